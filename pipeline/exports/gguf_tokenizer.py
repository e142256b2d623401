"""A byte-level BPE tokenizer.json as GGUF's keys: tokens by id, their kinds, merges, and which of llama.cpp's own ways
to cut text ("pre-tokenizers", built into it under names) is this one's.

Any other kind of tokenizer is left out: such a file takes and gives token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.strict_json import read_json
from pipeline.checkpoint.text import load_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType
DIGITS, BYTES, WORDS = "digits", "bytes", "words"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
# What a tokenizer.json cuts text by, beginning with these, in order -> tokenizer.ggml.pre.
CUTS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((r"\p{N}{1,3}", "[一-龥\u3040-ゟ\u30a0-ヿ]+"), "deepseek-v3"),
    ((_CONTRACTIONS + "{1,3}",), "llama-bpe"),
    ((_CONTRACTIONS + "|",), "qwen2"),
    (("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"), "deepseek-coder"),
    (("[\r\n]", r"\s?[A-Za-zµÀ-Ö"), "deepseek-llm"),
    ((DIGITS, WORDS), "smollm"),
    ((WORDS,), "gpt-2"),
)
UNKNOWN = "default"
UNKNOWN_NOTE = (
    "llama.cpp has no pre-tokenizer that cuts text as this tokenizer does; written as `default`: pass token ids, or "
    "its tokens may be others"
)
NO_VOCABULARY_NOTE = "the tokenizer is no byte-level BPE and was left out: llama.cpp takes and gives token ids"


def add_tokenizer(writer: GGUFWriter, engine: CheckpointFolder) -> list[str]:
    """Writes the keys; returns what a user must know. Raises CheckpointError for files that cannot be read."""
    path = engine.path / "tokenizer.json"
    document = read_json(path) if path.is_file() else {}
    model, kinds = document.get("model") or {}, list(_list_cuts(document.get("pre_tokenizer")))
    if model.get("type") != "BPE" or not {BYTES, WORDS}.intersection(kinds):
        writer.add_tokenizer_model("none")
        return [NO_VOCABULARY_NOTE]
    tokenizer = load_tokenizer(path)  # says what is wrong with the file; what is looked up below is there
    settings = _read_settings(engine.path)
    tokens, types = _list_tokens(document, engine.architecture.vocab_size)
    pre = UNKNOWN if model["merges"] else "gpt-2"  # without merges a token is a byte, however text is cut
    pre = next((name for cuts, name in CUTS if _begins(kinds, cuts)), pre)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    # llama.cpp refuses a file without merges. One that makes no token is undone again, byte by byte.
    writer.add_token_merges(merges or ["Ġ Ġ"])
    ids = {token: index for index, token in enumerate(tokens)}
    for kind, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        found = _find_id(kind, settings, ids, engine.config)
        if found is not None:
            add(found)
    bos = _find_id("bos", settings, ids, engine.config)
    writer.add_add_bos_token(bos is not None and tokenizer.encode("a").ids[:1] == [bos])
    if isinstance(template := settings.get("chat_template"), str):
        writer.add_chat_template(template)
    return [UNKNOWN_NOTE] if pre == UNKNOWN else []


def _list_cuts(node: Any) -> Iterator[str]:
    """The regular expressions and named ways by which a pre_tokenizer cuts, in order."""
    if not isinstance(node, Mapping):
        return
    kind = node.get("type")
    if kind == "Sequence":
        for each in node.get("pretokenizers", ()):
            yield from _list_cuts(each)
    elif kind == "Split":
        yield str((node.get("pattern") or {}).get("Regex", "")).replace(r"\r", "\r").replace(r"\n", "\n")
    elif kind == "Digits":
        yield DIGITS if node.get("individual_digits") else "runs of digits"
    elif kind == "ByteLevel":
        yield WORDS if node.get("use_regex", True) else BYTES
    else:
        yield str(kind)


def _begins(kinds: list[str], cuts: tuple[str, ...]) -> bool:
    wanted = [cut.replace(r"\r", "\r").replace(r"\n", "\n") for cut in cuts]
    if len(kinds) < len(wanted):
        return False
    # Only the last may be cut short: "[\r\n]" is not "[\r\n]+".
    return kinds[: len(wanted) - 1] == wanted[:-1] and kinds[len(wanted) - 1].startswith(wanted[-1])


def _list_tokens(document: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Every id's token and kind; ids that the tokenizer has not are there to fill the embedding."""
    tokens, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for token, index in document["model"]["vocab"].items():
        if index < size:
            tokens[index], types[index] = token, NORMAL
    for added in document.get("added_tokens") or ():
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    return tokens, types


def _read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template from wherever it is."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    for name in ("chat_template.jinja", "chat_template.json"):
        file = folder / name
        if file.is_file() and "chat_template" not in settings:
            is_text = name.endswith("jinja")
            settings["chat_template"] = file.read_text("utf-8") if is_text else read_json(file).get("chat_template")
    return settings


def _find_id(kind: str, settings: Mapping[str, Any], ids: Mapping[str, int], config: Mapping[str, Any]) -> int | None:
    """A special token's id: what the tokenizer's settings name, else config.json's number."""
    token = settings.get(f"{kind}_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    if isinstance(token, str) and token in ids:
        return ids[token]
    number = config.get(f"{kind}_token_id")
    number = number[0] if isinstance(number, list) and number else number
    return number if isinstance(number, int) and 0 <= number < len(ids) else None
