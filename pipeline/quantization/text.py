"""Calibration text: files to token ids, cut into pieces of one length, drawn with a seed.

Files of ordinary size are tokenized whole, their pieces put into one pool and drawn from. Where a file says its weight,
or is too large to be read whole, each file gives a number of pieces of its own: by the weights, else by the sizes. A
large file is entered at as many places, one in each of equal parts, and only what is drawn is read; whole, where that
is not enough.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.text import encode_file, load_tokenizer, token_array
from pipeline.errors import CheckpointError, QuantizationError
from pipeline.progress import SILENT, Progress
from pipeline.quantization.calibration_files import SETTING, CalibrationFile, name_file
from pipeline.quantization.chat import ChatTemplate
from pipeline.quantization.documents import Documents

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Iterator, Sequence

    from tokenizers import Tokenizer
    from torch import Tensor

WHOLE_BYTES = 16 << 20  # of a file that is tokenized whole: half a minute's work
BATCH, BATCH_CHARACTERS = 256, 1 << 20  # documents tokenized at a time, and about how many characters
CHARACTERS = 5  # of a token, about: what is read at a time where a file is entered


def sample_tokens(
    tokenizer_file: Path,
    files: Sequence[CalibrationFile | Path],
    *,
    samples: int,
    length: int,
    seed: int,
    vocab_size: int,
    bos: int | None = None,
    progress: Progress = SILENT,
) -> Tensor:
    """int64 [samples, length] token ids, pieces in the order of the files, none twice.

    Every piece begins with `bos` where there is one, as the model's real inputs do; chat templates that write it
    themselves do not double it. Raises QuantizationError for too little text, lines that cannot be read and ids beyond
    the model's vocabulary, CheckpointError for files that cannot be read.
    """
    import torch

    wanted = length - (bos is not None)
    if wanted < 1:
        raise QuantizationError(f"calibration.length {length} leaves no room for text", hint="make it at least 2")
    template = ChatTemplate(tokenizer_file.parent)
    sources = [_Source(_open(file), template, tokenizer_file, wanted, bos, progress) for file in files]
    if all(source.file.weight is None and source.is_small for source in sources):
        pieces = _draw([piece for source in sources for piece in source.cut()], samples, random.Random(seed))
    else:
        pieces = _draw_shares(sources, samples, seed)
    if len(pieces) < samples:
        found = "; ".join(source.describe() for source in sources)
        raise _refuse_amount(samples, length, f"{len(pieces)} ({found})")
    first = token_array(() if bos is None else (bos,))
    tokens = torch.stack([torch.frombuffer(first + piece, dtype=torch.int32) for piece in pieces]).long()
    if int(tokens.max()) >= vocab_size:
        raise QuantizationError(
            f"{tokenizer_file} gives token {int(tokens.max())}, the model's vocabulary ends at {vocab_size - 1}",
            hint="the tokenizer belongs to another model",
        )
    return tokens


def require_bytes(sources: Sequence[Documents], *, samples: int, length: int) -> None:
    """Refuses plain text that is certainly too little, as sample_tokens does: a token is a byte at least, and one of
    each piece may be BOS."""
    most = sum(source.nbytes for source in sources) // max(1, length - 1)
    if most < samples and all(source.format == "text" for source in sources):
        found = "; ".join(f"{source.path}: {source.nbytes:,} bytes" for source in sources)
        raise _refuse_amount(samples, length, f"at most {most} ({found})")


def _refuse_amount(samples: int, length: int, found: str) -> QuantizationError:
    return QuantizationError(
        f"too little calibration text: {samples} pieces of {length} tokens are wanted, there are {found}",
        hint=f"add text to {SETTING}, or lower samples or length",
    )


def _open(file: CalibrationFile | Path) -> CalibrationFile:
    opened = name_file(file)
    if not opened.path.is_file():  # reading a pipe would wait, a device would never end
        what = "is no regular file" if opened.path.exists() else "is missing"
        raise CheckpointError(f"{opened.path} {what}", hint=f"{SETTING} names files of text")
    return opened


def _draw(pieces: list[array[int]], count: int, chance: random.Random) -> list[array[int]]:
    """`count` of the pieces in their order, all where there are fewer."""
    if len(pieces) <= count:
        return pieces
    return [pieces[i] for i in sorted(chance.sample(range(len(pieces)), count))]


def _draw_shares(sources: Sequence[_Source], samples: int, seed: int) -> list[array[int]]:
    """By the files' weights. Where none says one, what a file is too short for comes of the others, shared as well."""
    weights = [source.weight(sources) for source in sources]
    wanted = _share(samples, weights)
    for source, share in zip(sources, wanted, strict=True):
        source.share = share

    def draw(i: int) -> list[array[int]]:
        return sources[i].draw(wanted[i], random.Random(f"{seed}/{i}"))

    found = [draw(i) for i in range(len(sources))]
    if all(source.file.weight is None for source in sources):
        while (missing := samples - sum(map(len, found))) and (
            others := [i for i, pieces in enumerate(found) if weights[i] and len(pieces) == wanted[i]]
        ):
            for i, more in zip(others, _share(missing, [weights[i] for i in others]), strict=True):
                if more:
                    wanted[i] += more
                    found[i] = draw(i)
    return [piece for pieces in found for piece in pieces]


def _share(samples: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to the weights, `samples` in all: the largest remainders are rounded up."""
    exact = [samples * weight / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in order[: samples - sum(shares)]:
        shares[i] += 1
    return shares


@dataclass(slots=True)
class _Source:
    """One file, and what was found in it."""

    file: CalibrationFile
    template: ChatTemplate
    tokenizer_file: Path
    wanted: int  # tokens of a piece, without BOS
    bos: int | None
    progress: Progress
    tokens: int = 0  # of a file that was read whole
    share: int | None = None  # pieces that were to come of it, where each file has a share
    found: int = 0  # pieces that did

    @property
    def is_small(self) -> bool:
        return self.file.path.stat().st_size <= WHOLE_BYTES

    def weight(self, sources: Sequence[_Source]) -> float:
        if all(source.file.weight is None for source in sources):
            return float(self.file.path.stat().st_size)
        return self.file.weight if self.file.weight is not None else 1.0

    def describe(self) -> str:
        """What was found, in tokens where all of it was read, beside the share that was to come of it."""
        if self.share is None:
            return f"{self.file.path}: {self.tokens:,} tokens"
        what = "enough" if self.found >= self.share else f"{self.tokens:,} tokens"
        return f"{self.file.path}: {what} for its share of {self.share:,} pieces"

    def draw(self, count: int, chance: random.Random) -> list[array[int]]:
        """At most `count` pieces."""
        pieces = self._find(count, chance)
        self.found = len(pieces)
        return pieces

    def _find(self, count: int, chance: random.Random) -> list[array[int]]:
        if not self.is_small:
            for parts in (count, 2 * count):  # what begins near an end may be too short for a piece
                pieces = self._enter(parts, chance)
                if len(pieces) >= count:
                    return _draw(pieces, count, chance)
        return _draw(self.cut(), count, chance)

    def cut(self) -> list[array[int]]:
        """The whole file in pieces; what is left at its end is too short for one."""
        documents = Documents(self.file, self.template)
        if documents.format == "text":
            ids = encode_file(self.tokenizer_file, self.file.path, setting=SETTING, progress=self.progress)
        else:
            ids, tokenizer = token_array(), load_tokenizer(self.tokenizer_file)
            self.progress.start(f"tokenizing {self.file.path.name}", documents.nbytes, "B")
            at = 0
            for end, texts in _batch(documents.read()):
                ids += self._encode(tokenizer, texts)
                self.progress.advance(end - at)
                at = end
        self.tokens = len(ids)
        return [ids[start : start + self.wanted] for start in range(0, len(ids) - self.wanted + 1, self.wanted)]

    def _enter(self, count: int, chance: random.Random) -> list[array[int]]:
        """A piece from a random place in each of `count` equal parts of the file, none reaching into the next; fewer
        where what is left behind such a place is too short, or belongs to the piece before."""
        documents = Documents(self.file, self.template)
        tokenizer = load_tokenizer(self.tokenizer_file)
        part = documents.nbytes / max(count, 1)
        pieces: list[array[int]] = []
        behind = 0
        self.progress.start(f"tokenizing pieces of {self.file.path.name}", count, "pieces")
        for i in range(count):
            ids = token_array()
            start = max(behind, int((i + chance.random()) * part))
            for end, text in documents.read(start, part=max(CHARACTERS * self.wanted, 256)):
                behind = end
                ids += self._encode(tokenizer, [text])
                if len(ids) >= self.wanted:
                    pieces.append(ids[: self.wanted])
                    self.progress.advance(1)
                    break
            else:
                break  # what is too short from here on is from every later place
        return pieces

    def _encode(self, tokenizer: Tokenizer, texts: Sequence[str]) -> array[int]:
        found = token_array()
        for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
            ids: list[int] = encoding.ids
            found.extend(ids[1:] if ids[:1] == [self.bos] else ids)
        return found


def _batch(documents: Iterable[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    """Texts in lists of at most BATCH, that end with the text that fills them, and the byte where each ends."""
    batch: list[str] = []
    end = 0
    for end, text in documents:
        batch.append(text)
        if len(batch) == BATCH or sum(map(len, batch)) >= BATCH_CHARACTERS:
            yield end, batch
            batch = []
    if batch:
        yield end, batch
