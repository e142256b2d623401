"""Calibration text: files to token ids, cut into pieces of one length, drawn with a seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from pipeline.checkpoint.text import encode_file
from pipeline.errors import QuantizationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor


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

    Every piece begins with `bos` where there is one, as the model's real inputs do. Raises QuantizationError for too
    little text and ids beyond the model's vocabulary, CheckpointError for files that cannot be read.
    """
    import torch

    wanted = length - (bos is not None)
    if wanted < 1:
        raise QuantizationError(f"calibration.length {length} leaves no room for text", hint="make it at least 2")
    counts: dict[Path, int] = {}
    pieces: list[list[int]] = []
    for file in files:
        ids = encode_file(tokenizer_file, file, setting="stages.quantize.calibration.files")
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
