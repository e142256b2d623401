"""Calibration text: files to token ids, cut into pieces of one length, drawn with a seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from pipeline.errors import QuantizationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

CHUNK_CHARACTERS = 1 << 16  # tokenized at a time: a whole file in one call is slow and large


def sample_tokens(
    tokenizer_file: Path,
    files: Sequence[Path],
    *,
    samples: int,
    length: int,
    seed: int,
    vocab_size: int,
    bos: int | None = None,
) -> Tensor:
    """int64 [samples, length] token ids, pieces in the order of the text, none twice.

    Every piece begins with `bos` where there is one, as the model's real inputs do. Raises QuantizationError for a
    missing or undecodable file, too little text, and ids beyond the model's vocabulary.
    """
    import torch

    wanted = length - (bos is not None)
    if wanted < 1:
        raise QuantizationError(f"calibration.length {length} leaves no room for text", hint="make it at least 2")
    counts: dict[Path, int] = {}
    pieces: list[list[int]] = []
    for file in files:
        ids = _encode(tokenizer_file, file)
        counts[file] = len(ids)
        pieces += [ids[start : start + wanted] for start in range(0, len(ids) - wanted + 1, wanted)]
    if len(pieces) < samples:
        found = "; ".join(f"{file}: {count:,} tokens" for file, count in counts.items())
        raise QuantizationError(
            f"too little calibration text: {samples} pieces of {length} tokens are wanted, "
            f"there are {len(pieces)} ({found})",
            hint="add files to stages.quantize.calibration.files, or lower samples or length",
        )
    drawn = sorted(random.Random(seed).sample(range(len(pieces)), samples))
    first = [] if bos is None else [bos]
    tokens = torch.tensor([first + pieces[i] for i in drawn], dtype=torch.int64)
    if int(tokens.max()) >= vocab_size:
        raise QuantizationError(
            f"{tokenizer_file} gives token {int(tokens.max())}, the model's vocabulary ends at {vocab_size - 1}",
            hint="the tokenizer belongs to another model",
        )
    return tokens


def _encode(tokenizer_file: Path, file: Path) -> list[int]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises bare Exception
        raise QuantizationError(f"{tokenizer_file}: {error}", hint="calibration needs a tokenizer.json") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        encodings = tokenizer.encode_batch(list(_chunks(file)), add_special_tokens=False)
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizationError(
            f"calibration file {file}: {error}", hint="stages.quantize.calibration.files names UTF-8 text files"
        ) from error
    return [token for encoding in encodings for token in encoding.ids]


def _chunks(file: Path) -> Iterator[str]:
    """The text in parts that end at a line's end, so that no word is cut."""
    with open(file, encoding="utf-8") as text:
        while lines := text.readlines(CHUNK_CHARACTERS):
            yield "".join(lines)
