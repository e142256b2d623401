"""Held-out text as token sequences to score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.text import encode_file
from pipeline.errors import ConfigError, QuantizationError
from pipeline.quantization.calibration_files import JSON_LINES

if TYPE_CHECKING:
    from pipeline.evaluation.schedule import TokenSequence


def read_tokens(tokenizer: Path, files: Sequence[Path], *, setting: str) -> list[int]:
    """The tokens of all files, one after the other. Raises ConfigError naming the file, and the `setting`,
    CheckpointError for the tokenizer."""
    require_plain(files, setting=setting)
    return [token for path in files for token in encode_file(tokenizer, path, setting=setting)]


def require_plain(files: Sequence[Path], *, setting: str) -> None:
    """ConfigError for what is JSON lines by its name: a model would be judged by how it writes JSON."""
    for path in files:
        if path.suffix.lower() in JSON_LINES:
            raise ConfigError(
                f"{path}: held-out text is plain text, and this is JSON lines by its name",
                hint=f"write the lines' texts to a .txt file, and name that under {setting}",
            )


def cut_windows(
    tokens: Sequence[int], *, total: int, window: int, origin: str, first: Sequence[int] = ()
) -> list[TokenSequence]:
    """Pieces of `window` tokens, together at most `total`, each beginning with `first` (a BOS, as calibration has it).
    Raises QuantizationError where the text is too short."""
    from pipeline.evaluation.schedule import TokenSequence

    size = window - len(first)
    count = min(total // window, len(tokens) // size)
    if total < window:
        raise QuantizationError(
            f"{origin}: {total} tokens are to be scored, fewer than one window of {window}",
            hint="score more tokens, or take a shorter window",
        )
    if count == 0:
        raise QuantizationError(
            f"{origin}: {len(tokens)} tokens of held-out text, fewer than one window of {window}",
            hint="name more held-out text, or take a shorter window",
        )
    return [TokenSequence(tokens=(*first, *tokens[i * size : (i + 1) * size])) for i in range(count)]
