"""Text to token ids, by a checkpoint's own tokenizer.json: what calibrates and what judges is read the same way."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.text_faults import find_fault
from pipeline.errors import CheckpointError, ConfigError
from pipeline.progress import SILENT, Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHUNK_CHARACTERS = 1 << 14  # tokenized by one thread: a whole file in one call is slow and large
MOST_OF_LINE = 1 << 16  # characters of it that are read for its end
MOST_CHUNKS = 8  # at a time, by as many threads. What the library holds of a chunk is fifty times as large as it


def encode_text(tokenizer_file: Path, text: str) -> list[int]:
    """Token ids, without special tokens. Raises CheckpointError for a tokenizer that cannot be read."""
    ids: list[int] = load_tokenizer(tokenizer_file).encode(text, add_special_tokens=False).ids
    return ids


def encode_file(tokenizer_file: Path, file: Path, *, setting: str, progress: Progress = SILENT) -> array[int]:
    """Token ids of a UTF-8 text file, cut at lines' ends, without special tokens: 4 bytes each, where a list takes
    40.

    Raises CheckpointError for the tokenizer, ConfigError for the file, with the `setting` of the config that names it.
    """
    tokenizer, ids = load_tokenizer(tokenizer_file), token_array()
    chunks, together = _chunks(file), min(len(os.sched_getaffinity(0)), MOST_CHUNKS)
    try:
        progress.start(f"tokenizing {file.name}", file.stat().st_size, "B")
        while batch := list(islice(chunks, together)):
            if any("\0" in chunk for chunk in batch):
                raise UnicodeError("NUL")
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):  # without places in the text
                ids.extend(encoding.ids)
            progress.advance(sum(len(chunk.encode()) for chunk in batch))
    except (OSError, UnicodeError) as error:
        fault = f"{file}: {error.strerror}" if isinstance(error, OSError) else find_fault(file)
        raise ConfigError(
            fault or f"{file} changed while it was read", hint=f"{setting} names UTF-8 text files"
        ) from error
    return ids


def token_array(ids: Iterable[int] = ()) -> array[int]:
    """Of int32."""
    return array("i", ids)


def compare_vocabulary(tokenizer_file: Path, vocab_size: int) -> str | None:
    """What to note of a tokenizer that has far fewer tokens than the model; a few it may lack. Raises CheckpointError
    where it has more, or cannot be read."""
    tokens = load_tokenizer(tokenizer_file).get_vocab().values()
    if (largest := max(tokens, default=0)) >= vocab_size:
        raise CheckpointError(
            f"{tokenizer_file} has token {largest}, the model's vocabulary ends at {vocab_size - 1}",
            hint="it belongs to another model: copy it from the model's own repository",
        )
    if 2 * len(tokens) > vocab_size:
        return None
    return f"{tokenizer_file} has {len(tokens):,} tokens, the model {vocab_size:,}: is it another model's?"


def load_tokenizer(tokenizer_file: Path) -> Tokenizer:
    """Without truncation and padding, whatever the file says. Raises CheckpointError where it cannot be read."""
    from tokenizers import Tokenizer

    if not tokenizer_file.is_file():  # reading a pipe would wait, a device would never end
        what = "is no regular file" if tokenizer_file.exists() else "is missing"
        raise CheckpointError(f"{tokenizer_file} {what}", hint="copy tokenizer.json from the model's own repository")
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises bare Exception for every fault
        raise CheckpointError(
            f"{tokenizer_file}: {error}", hint="copy tokenizer.json from the model's own repository"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Each thread keeps the words that it met, megabytes of them, also when the tokenizer is gone; text of calibration's
    # size is read as fast without.
    resize: Callable[[int], None] | None = getattr(tokenizer.model, "_resize_cache", None)  # WordLevel has none
    if resize is not None:
        resize(0)
    return tokenizer


def _chunks(file: Path) -> Iterator[str]:
    """The text in parts that end at a line's end, or of a long line at a word's, so that no word is cut."""
    with open(file, encoding="utf-8-sig") as text:  # a byte order mark is no text
        rest = ""
        while read := text.read(CHUNK_CHARACTERS):
            chunk, rest = rest + read, ""
            if not chunk.endswith("\n"):
                chunk += (more := text.readline(MOST_OF_LINE))
                if len(more) == MOST_OF_LINE and not more.endswith("\n"):
                    cut = chunk.rfind(" ", 1)
                    chunk, rest = (chunk[:cut], chunk[cut:]) if cut > 0 else (chunk, "")
            yield chunk
        if rest:
            yield rest
