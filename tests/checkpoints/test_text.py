"""The shipped texts: their split, their sizes, their licence."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from checkpoints.corpus import ROOT, TEXT, CorpusError, read_documents, split_documents
from checkpoints.models import RECIPES

PARTS = ("heldout", "calibration", "training")
LONG_PARAGRAPH = 200  # characters; shorter ones ("New in version 3.3.") recur by nature


def read_text(part: str) -> str:
    return (TEXT / f"{part}.txt").read_text(encoding="utf-8")


def test_no_document_is_in_two_parts() -> None:
    split = json.loads((TEXT / "documents.json").read_text(encoding="utf-8"))
    assert all(split[part] for part in PARTS)
    for one, other in combinations(PARTS, 2):
        assert not set(split[one]) & set(split[other])


def test_no_long_paragraph_is_in_both_texts() -> None:
    paragraphs = [
        {piece for piece in read_text(part).split("\n\n") if len(piece) > LONG_PARAGRAPH}
        for part in ("heldout", "calibration")
    ]
    assert all(paragraphs)
    assert not paragraphs[0] & paragraphs[1]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_calibration_holds_512_samples_of_256_tokens(name: str) -> None:
    tokenizer = Tokenizer.from_file(str(ROOT / name / "tokenizer.json"))
    pieces = read_text("calibration").split("\n\n")
    assert sum(len(encoding.ids) - 1 for encoding in tokenizer.encode_batch(pieces)) >= 512 * 256


def test_sizes() -> None:
    assert 190_000 < len(read_text("heldout").encode()) < 260_000
    assert 590_000 < len(read_text("calibration").encode()) < 660_000


def test_notice_is_kept() -> None:
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (TEXT / "NOTICE").read_text(encoding="utf-8")


def test_split_covers_every_document_and_ignores_their_order() -> None:
    documents = {f"library/m{index}": "word " * 4000 for index in range(200)}
    corpus = split_documents(documents, "1")
    parts = [getattr(corpus, part) for part in PARTS]
    assert sum(len(part) for part in parts) == len(documents)
    assert set().union(*parts) == set(documents)
    assert split_documents(dict(reversed(documents.items())), "1") == corpus


def test_long_documents_are_trained_on() -> None:
    corpus = split_documents({"library/long": "word " * 20_000, "library/short": "word"}, "1")
    assert set(corpus.training) == {"library/long"}


def test_a_folder_without_pages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no \*\.rst\.txt"):
        read_documents(tmp_path)
