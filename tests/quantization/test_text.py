"""Calibration text: seeded, without overlap, and refused by name where there is too little."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from pipeline.errors import QuantizationError
from pipeline.quantization import text
from tests.fixtures import write_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path / "tokenizer.json"


def sample(tokenizer: Path, *files: Path, samples: int = 4, length: int = 8, **options: int) -> torch.Tensor:
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
