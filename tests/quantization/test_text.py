"""Calibration text: seeded, without overlap, and refused by name where there is too little."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from pipeline.checkpoint.text import CHUNK_CHARACTERS
from pipeline.errors import QuantizationError
from pipeline.quantization import documents, text
from pipeline.quantization.calibration_files import PlainFile
from pipeline.quantization.documents import Documents
from tests.quantization.texts import decode, sample, write_lines


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


@pytest.mark.parametrize("whole", [True, False])
def test_tokenizing_says_where_it_is(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Of each file: bytes, or where only pieces are drawn, pieces; more than once, and to the end."""
    monkeypatch.setattr(text, "WHOLE_BYTES", 1 << 24 if whole else 1000)
    write_lines(tmp_path / "a.jsonl", [{"text": f"é line {i}"} for i in range(1000)])
    (tmp_path / "b.txt").write_text("é line\n" * (16 * CHUNK_CHARACTERS))
    told: list[tuple[str, float, str]] = []
    amounts: list[list[float]] = []

    class Told:
        def start(self, item: str, total: float, unit: str) -> None:
            told.append((item, total, unit))
            amounts.append([])

        def advance(self, amount: float) -> None:
            amounts[-1].append(amount)

        def note(self, message: str) -> None:
            pytest.fail(message)

    files = [PlainFile(path=tmp_path / name, weight=None if whole else 1.0) for name in ("a.jsonl", "b.txt")]
    sample(tokenizer, *files, samples=10, progress=Told())
    sizes = [file.path.stat().st_size for file in files]
    names = ("tokenizing a.jsonl", "tokenizing b.txt")
    if not whole:
        sizes, names = [5, 5], ("tokenizing pieces of a.jsonl", "tokenizing pieces of b.txt")
    assert told == [(name, size, "B" if whole else "pieces") for name, size in zip(names, sizes, strict=True)]
    assert [sum(each) for each in amounts] == sizes and all(len(each) > 1 for each in amounts)


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

    def counted(self: documents.Documents, file: BinaryIO, part: int) -> bytes:
        line = true_read(self, file, part)
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


def write_words(path: Path, form: str, documents: int, length: int) -> str:
    """`length` numbered words in each document, all on one line; what they are as one text."""
    words = [f"w{i:06}" for i in range(documents * length)]
    texts = [" ".join(words[i * length : (i + 1) * length]) for i in range(documents)]
    lines = [json.dumps({"text": text}) for text in texts] if form == "jsonl" else texts
    path.write_text("\n".join(lines) + "\n" * (form == "jsonl"))
    return ("\n\n" if form == "jsonl" else "\n").join(texts)


@pytest.mark.parametrize(("form", "documents"), [("text", 1), ("jsonl", 1), ("jsonl", 7), ("text", 7)])
def test_long_lines_are_entered_anywhere(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, documents: int
) -> None:
    """Forty pieces of few lines: spread over the file, cut between words, none twice, little tokenized."""
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    file = PlainFile(path=tmp_path / "long", format=form)
    whole = write_words(file.path, form, documents, 35_000 // documents)
    monkeypatch.setattr(text._Source, "cut", lambda self: pytest.fail("read whole"))
    first, again, other = (sample(tokenizer, file, samples=40, length=64, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    places = [whole.index(decode(tokenizer, piece)) for piece in first]  # raises where a piece is not the text's
    assert all(place == 0 or whole[place - 1].isspace() or whole[place].isspace() for place in places)
    assert places == sorted(places) and min(b - a for a, b in itertools.pairwise(places)) >= 64
    part = len(whole) / 40
    assert all(abs(place / part - i) < 1.3 for i, place in enumerate(places))


def test_what_has_no_text_at_its_end_is_not_read_again_for_every_piece(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(
        tmp_path / "a.jsonl", [*({"text": f"def f{i}(x): pass"} for i in range(400)), *[{"text": ""}] * 4000]
    )
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    read, decoded = Documents._decode, []

    def count(self: Documents, line: bytes, begin: int) -> str:
        decoded.append(begin)
        return read(self, line, begin)

    monkeypatch.setattr(Documents, "_decode", count)
    assert len(sample(tokenizer, file, samples=20, length=8)) == 20
    assert len(decoded) < 5 * 4400


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_a_large_file_that_is_nearly_used_up_is_read_whole(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    file = PlainFile(path=tmp_path / "long", format=form)
    whole = write_words(file.path, form, 3, 500)
    fits = len(whole) // 50
    tokens = sample(tokenizer, file, samples=fits, length=50)
    assert "".join(decode(tokenizer, piece) for piece in tokens) == whole[: fits * 50]
    count = len(whole) + 2 * (form == "jsonl")
    found = re.escape(f"there are {fits} ({file.path}: {count:,} tokens for its share of 1,000 pieces)")
    with pytest.raises(QuantizationError, match=found):
        sample(tokenizer, file, samples=1000, length=50)


def test_what_a_file_is_too_short_for_comes_of_the_others(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without weights: its size, of JSON that is no text, promised more."""
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    write_lines(tmp_path / "a.jsonl", [{"text": "x" * 8, "more": "y" * 500}] * 60)
    (tmp_path / "b.txt").write_text("z" * 30_000)
    first, again = (sample(tokenizer, tmp_path / "a.jsonl", tmp_path / "b.txt", samples=200) for _ in range(2))
    assert torch.equal(first, again)
    counts = Counter(decode(tokenizer, piece)[0] == "z" for piece in first)
    assert counts[True] + counts[False] == 200 and 40 < counts[False] <= 75
    with pytest.raises(QuantizationError, match=r"a.jsonl: 600 tokens for its share of 101 pieces; .*b.txt: enough"):
        files = [PlainFile(path=tmp_path / name, weight=1.0) for name in ("a.jsonl", "b.txt")]
        sample(tokenizer, *files, samples=202)
    # Two others share what is missing, by their sizes; where all is too little, shares are those of the wish.
    (tmp_path / "c.txt").write_text("w" * 60_000)
    (tmp_path / "nothing.txt").touch()
    names = ("nothing.txt", "a.jsonl", "b.txt", "c.txt")
    drawn = Counter(
        decode(tokenizer, piece)[0] for piece in sample(tokenizer, *(tmp_path / n for n in names), samples=400)
    )
    assert drawn["x"] <= 75 and abs(drawn["w"] / drawn["z"] - 2) < 0.1
    with pytest.raises(QuantizationError) as caught:
        sample(tokenizer, *(tmp_path / n for n in names), samples=20_000)
    shares = re.findall(r"for its share of ([\d,]+) pieces", caught.value.message)
    assert len(shares) == 4 and sum(int(share.replace(",", "")) for share in shares) == 20_000


def test_text_without_spaces_is_cut_between_characters(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    (tmp_path / "a.txt").write_text("日本語" * 9000)
    assert sample(tokenizer, tmp_path / "a.txt", samples=30, length=64).shape == (30, 64)


def test_texts_of_nothing_are_no_text(tokenizer: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": " \n"}] * 100)
    with pytest.raises(QuantizationError, match=r"there are 0 \(.*a.jsonl: 0 tokens\)"):
        sample(tokenizer, path)
