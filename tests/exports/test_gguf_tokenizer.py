"""Tokenizers as GGUF's keys: which of llama.cpp's ways to cut text is meant, tokens, kinds, and what is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

import checkpoints
from pipeline.errors import CheckpointError
from pipeline.exports.formats import export_checkpoint
from pipeline.exports.gguf_tokenizer import NO_VOCABULARY_NOTE, UNKNOWN_NOTE
from tests.exports import support

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"


def split(*patterns: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in patterns]


# tokenizer.json's pre_tokenizer of DeepSeek-V3, Llama 3, Qwen2, DeepSeek-Coder and -LLM (cut short), SmolLM2, GPT-2.
KNOWN: list[tuple[list[dict[str, Any]], str]] = [
    ([*split(r"\p{N}{1,3}", "[一-龥\u3040-ゟ\u30a0-ヿ]+", "[!-~][A-Za-z]+"), BYTES], "deepseek-v3"),
    ([*split(WORDS + "{1,3}" + TAIL), BYTES], "llama-bpe"),
    ([*split(WORDS + TAIL), BYTES], "qwen2"),
    ([*split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥]+"), DIGITS, BYTES], "deepseek-coder"),
    ([*split("[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+", r"\s?[!-/]+"), DIGITS, BYTES], "deepseek-llm"),
    ([DIGITS, {**BYTES, "use_regex": True}], "smollm"),
    ([{**BYTES, "use_regex": True}], "gpt-2"),
    ([*split("[\r\n]+", r"\s?\p{L}+", r"\s?\p{P}+"), BYTES], "default"),
    ([*split(r"\p{N}{1,2}"), BYTES], "default"),
]


def export(tmp_path: Path, edit: Any) -> tuple[dict[str, Any], list[str]]:
    """The keys of a file whose tokenizer.json `edit` was at, and what is said of it."""
    engine = support.convert("llama", tmp_path)
    file = engine.path / "tokenizer.json"
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document, ensure_ascii=False))
    report = export_checkpoint(engine, tmp_path / "out", "gguf")
    fields = GGUFReader(tmp_path / "out/model.gguf").fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}, report.remarks


@pytest.mark.parametrize(("cuts", "name"), KNOWN)
def test_how_text_is_cut(cuts: list[dict[str, Any]], name: str, tmp_path: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        document["pre_tokenizer"] = cuts[0] if len(cuts) == 1 else {"type": "Sequence", "pretokenizers": cuts}
        document["model"]["merges"] = [["a", "b"]]
        document["model"]["vocab"] |= {"ab": 300}

    keys, remarks = export(tmp_path, edit)
    assert keys["tokenizer.ggml.pre"] == name
    assert remarks == ([UNKNOWN_NOTE] if name == "default" else [])
    assert keys["tokenizer.ggml.merges"] == ["a b"]


def test_tokens_by_id_and_kind(tmp_path: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        document["added_tokens"].append(
            {**document["added_tokens"][0], "id": 400, "content": "<tool>", "special": False}
        )

    keys, remarks = export(tmp_path, edit)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert (tokens[0], types[0]) == ("<｜begin▁of▁sentence｜>", 3)  # noqa: RUF001
    assert (tokens[400], types[400]) == ("<tool>", 4)
    assert (tokens[300], types[300]) == ("[PAD300]", 5)
    assert types.count(1) == 256 and len(set(tokens)) == 512
    assert remarks == []  # without merges a token is a byte, however text is cut
    assert keys["tokenizer.ggml.merges"] == ["Ġ Ġ"]  # of no token: undone again


def test_other_tokenizers_are_left_out_and_said(tmp_path: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        document["pre_tokenizer"] = {"type": "Metaspace"}

    keys, remarks = export(tmp_path, edit)
    assert keys == {"tokenizer.ggml.model": "none"}
    assert remarks == [NO_VOCABULARY_NOTE]


def test_the_template_from_a_file_of_its_own(tmp_path: Path) -> None:
    engine = support.convert("llama", tmp_path)
    settings = json.loads((engine.path / "tokenizer_config.json").read_text())
    settings |= {"chat_template": None, "bos_token": {"content": settings["bos_token"]}, "pad_token": "none such"}
    del settings["chat_template"]
    (engine.path / "tokenizer_config.json").write_text(json.dumps(settings))
    (engine.path / "chat_template.jinja").write_text("{{ messages }}")
    export_checkpoint(engine, tmp_path / "out", "gguf")
    fields = GGUFReader(tmp_path / "out/model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert fields["tokenizer.ggml.bos_token_id"].contents() == 0
    assert "tokenizer.ggml.padding_token_id" not in fields


def test_shipped_tokenizers_have_no_name_in_llama_cpp() -> None:
    """They were trained with cuts like DeepSeek's, but not its own: the note must not be missing."""
    from pipeline.exports.gguf_tokenizer import CUTS, _begins, _list_cuts

    for file in Path(checkpoints.__file__).parent.glob("*/tokenizer.json"):
        kinds = list(_list_cuts(json.loads(file.read_text())["pre_tokenizer"]))
        assert not any(_begins(kinds, cuts) for cuts, _ in CUTS), file


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", None),
        ("chat_template.json", "{"),
        ("chat_template.json", "[]"),
    ],
)
def test_a_damaged_file_is_named(name: str, text: str | None, tmp_path: Path) -> None:
    """An added token without its id, and a template's file that holds no object."""
    engine = support.convert("llama", tmp_path)
    settings = json.loads((engine.path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (engine.path / "tokenizer_config.json").write_text(json.dumps(settings))
    document = json.loads((engine.path / "tokenizer.json").read_text())
    if text is None:
        del document["added_tokens"][0]["id"]
        text = json.dumps(document)
    (engine.path / name).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        export_checkpoint(engine, tmp_path / "out", "gguf")
