"""Calibration text: seeded, without overlap, and refused by name where there is too little."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from pipeline.errors import QuantizationError
from pipeline.quantization import documents, text
from pipeline.quantization.documents import CalibrationFile, PlainFile
from tests.fixtures import write_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path / "tokenizer.json"


def sample(
    tokenizer: Path, *files: Path | CalibrationFile, samples: int = 4, length: int = 8, **options: int
) -> torch.Tensor:
    values: dict[str, int] = {"seed": 0, "vocab_size": 512, **options}
    return text.sample_tokens(tokenizer, files, samples=samples, length=length, **values)  # type: ignore[arg-type]


def decode(tokenizer: Path, ids: torch.Tensor) -> str:
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    letters = {index: letter for letter, index in vocabulary.items()}
    return "".join(letters[i] for i in ids.tolist()).replace("Ġ", " ").replace("Ċ", "\n")


def test_pieces_are_the_text_itself(tokenizer: Path, tmp_path: Path) -> None:
    lines = "".join(f"line {i:03}\n" for i in range(100))
    (tmp_path / "a.txt").write_text(lines)
    tokens = sample(tokenizer, tmp_path / "a.txt", samples=100, length=9)
    assert tokens.shape == (100, 9) and tokens.dtype == torch.int64
    assert "".join(decode(tokenizer, piece) for piece in tokens) == lines
    # With BOS the pieces are one token shorter.
    tokens = sample(tokenizer, tmp_path / "a.txt", samples=100, length=10, bos=0)
    assert (tokens[:, 0] == 0).all()
    assert "".join(decode(tokenizer, piece[1:]) for piece in tokens) == lines


def test_seed_decides(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{i} " for i in range(2000)))
    (tmp_path / "b.txt").write_text("".join(f"{i} " for i in range(5000, 6000)))
    files = tmp_path / "a.txt", tmp_path / "b.txt"
    first, again, other = (sample(tokenizer, *files, samples=50, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(piece) for piece in first.tolist()}) == 50


def test_too_little_text_names_files_and_counts(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 20)
    (tmp_path / "b.txt").write_text("y" * 7)
    found = re.escape(f"there are 2 ({tmp_path}/a.txt: 20 tokens; {tmp_path}/b.txt: 7 tokens)")
    with pytest.raises(QuantizationError, match=r"4 pieces of 8 tokens are wanted, " + found):
        sample(tokenizer, tmp_path / "a.txt", tmp_path / "b.txt")


def test_tokenizer_of_another_model(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to be cut into a few pieces of tokens")
    with pytest.raises(QuantizationError, match="vocabulary ends at 99"):
        sample(tokenizer, tmp_path / "a.txt", vocab_size=100)


CHATS = [
    [{"role": "user", "content": f"question {i}?"}, {"role": "assistant", "content": f"answer {i * 7}."}]
    for i in range(40)
]


def write_lines(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_json_lines_by_any_key(tokenizer: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"body": f"text {i}", "id": i} for i in range(10)])
    path.write_text(path.read_text().replace("\n", "\n\n", 3))  # blank lines are no records
    whole = "".join(f"text {i}\n\n" for i in range(10))
    tokens = sample(tokenizer, PlainFile(path=path, key="body"), samples=len(whole) // 8)
    assert "".join(decode(tokenizer, piece) for piece in tokens) == whole[: len(whole) // 8 * 8]


def test_transcripts_are_what_transformers_renders(tokenizer: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    rendered = [theirs.apply_chat_template(chat, tokenize=True, return_dict=False) for chat in CHATS]
    assert all(ids[0] == 0 and ids.count(0) == 1 and ids[-1] == 1 for ids in rendered)
    stream = [token for ids in rendered for token in ids[1:]]
    count = len(stream) // 15
    tokens = sample(tokenizer, path, samples=count, length=16, bos=0)
    assert (tokens[:, 0] == 0).all() and not (tokens[:, 1:] == 0).any()  # one BOS, at the beginning of each piece
    assert tokens[:, 1:].flatten().tolist() == stream[: count * 15]


def test_templates_run_in_a_sandbox(tokenizer: Path, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(QuantizationError, match=r"chats.jsonl:1: the model's chat template refuses it: .*unsafe"):
        sample(tokenizer, path)


def test_a_model_without_a_template(tokenizer: Path, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(QuantizationError, match="has no chat template"):
        sample(tokenizer, path)


def test_mixtures_go_by_weight(tokenizer: Path, tmp_path: Path) -> None:
    for name, letter in (("a", "x"), ("b", "y"), ("c", "z")):
        (tmp_path / f"{name}.txt").write_text(letter * 4000)
    files = [PlainFile(path=tmp_path / f"{n}.txt", weight=w) for n, w in (("a", 3.0), ("b", None), ("c", 0.5))]
    tokens = sample(tokenizer, *files, samples=100, length=8)
    # 100 shared as 3 : 1 : 0.5 is 66.7, 22.2, 11.1; the largest remainder takes what is left.
    assert Counter(decode(tokenizer, piece)[0] for piece in tokens) == {"x": 67, "y": 22, "z": 11}
    with pytest.raises(QuantizationError, match=r"there are 93 .*c.txt: 36 tokens"):
        (tmp_path / "c.txt").write_text("z" * 36)
        sample(tokenizer, *files, samples=100, length=8)


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_large_files_are_entered_and_not_read(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    draw = random.Random(0)
    texts = [f"{i:05} " + "".join(draw.choices("abc", k=draw.randint(1, 60))) for i in range(5000)]
    path = tmp_path / "large"
    lines = texts if form == "text" else [json.dumps({"text": each}) for each in texts]
    path.write_text("".join(line + "\n" for line in lines))
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    read: list[int] = []
    true_read = documents.Documents._read_line

    def counted(self: documents.Documents, file: object) -> bytes:
        line = true_read(self, file)  # type: ignore[arg-type]
        read.append(len(line))
        return line

    monkeypatch.setattr(documents.Documents, "_read_line", counted)
    file = PlainFile(path=path, format=form)
    first, again, other = (sample(tokenizer, file, samples=20, length=50, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert sum(read) < 3 * 20 * 250 < path.stat().st_size / 10
    starts = []
    whole = ("\n" if form == "text" else "\n\n").join(texts)
    for piece in first:
        found = decode(tokenizer, piece)
        starts.append(int(found[:5]))
        assert found in whole
    # One from each twentieth of the file, in order, none overlapping.
    assert starts == sorted(set(starts)) and all(abs(start / 250 - i) < 1.2 for i, start in enumerate(starts))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("[1]", "is no JSON object, but list"),
        ('{"body": "x", "n": 1}', "there is no key \"text\" (there is 'body', 'n')"),
        ('{"text": 3}', '"text" holds no text, but int'),
        ("[" * 100_000, "recursion"),
        ('{"text": "\\ud800"}', "surrogates"),
        (b'{"text": "\xff"}', "utf-8"),
    ],
)
def test_wrong_lines_are_named(tokenizer: Path, tmp_path: Path, line: str | bytes, problem: str) -> None:
    good = json.dumps({"text": "right"}).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(
        good * 3 + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good * 3
    )
    with pytest.raises(QuantizationError, match=rf"a.jsonl:4: (?s:.*){re.escape(problem)}"):
        sample(tokenizer, tmp_path / "a.jsonl", samples=1, length=100)


def test_lines_are_counted_where_a_file_was_entered(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "WHOLE_BYTES", 1)
    write_lines(tmp_path / "a.jsonl", [{"text": "right"}] * 500 + [{"body": "wrong"}] * 5 + [{"text": "right"}] * 500)
    with pytest.raises(QuantizationError, match=r"a.jsonl:50[1-5]: there is no key"):
        sample(tokenizer, tmp_path / "a.jsonl", samples=1, length=8 * 1024)


def test_lines_have_an_end(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b" " * (3 << 20))
    with pytest.raises(QuantizationError, match=r"a.jsonl:1: is longer than 1 MiB"):
        sample(tokenizer, tmp_path / "a.jsonl")
