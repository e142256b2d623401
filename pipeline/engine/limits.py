"""How large a step an engine must serve, and TensorRT's optimization profiles for it.

TensorRT plans a profile's workspace for the box of its largest sizes, each taken alone: the gathered pages of a layer
need B x K rows whatever is in them. So there is one *context* profile, for steps that hold chunks of prompts (and
single tokens beside them), and one *generation* profile per (batch, length) rectangle, where every sequence adds a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import CompatibilityError
from pipeline.network.inputs import Port

# Attention pads every sequence of a step to the longest chunk, [B, Q]; the default chunk keeps B x Q within this many
# times the step's rows, since workspace (with MLA: B x Q x heads x K) and wasted work grow with it.
PADDED_ROWS = 2
# What an engine holds of its weights: all of them, or none, until a refit brings them.
FULL, STRIPPED = "full", "stripped"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A generation phase: at most `batch` sequences of at most `length` tokens each."""

    batch: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One optimization profile. Sizes by the names that network/inputs.py declares: T, B, Q, MB, NB, N."""

    name: str
    phase: str  # "context" or "generation"
    minimum: Mapping[str, int]
    optimum: Mapping[str, int]
    maximum: Mapping[str, int]

    def shapes(self, ports: Iterable[Port]) -> dict[str, tuple[Shape, Shape, Shape]]:
        """Smallest, preferred and largest shape of each input."""
        return {
            port.name: (port.resolve(self.minimum), port.resolve(self.optimum), port.resolve(self.maximum))
            for port in ports
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLimits:
    """What an engine must hold. Raises CompatibilityError where the numbers contradict each other.

    max_seq_len: longest sequence, prompt and answer together, in tokens.
    max_batch_size: sequences in flight.
    max_num_tokens: rows of one context step, over all its sequences.
    generation: rectangles of the generation phase.
    block_size: tokens of one KV cache block.
    max_blocks: blocks of the KV pool, block 0 (padding) included.
    max_chunk: rows of one sequence in a context step, longer prompts are fed in several; None: see PADDED_ROWS.
    """

    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    generation: tuple[Rectangle, ...]
    block_size: int = 64
    max_blocks: int
    max_chunk: int | None = None

    def __post_init__(self) -> None:
        for key in ("max_seq_len", "max_batch_size", "max_num_tokens", "block_size", "max_chunk"):
            value = getattr(self, key)
            if value is not None and not 1 <= value < 2**31:
                raise _refuse(f"{key} is {value}", "give a positive number")
        if not self.generation:
            raise _refuse("generation has no profile", "give at least one batch and length")
        for rectangle in self.generation:
            if not 1 <= rectangle.batch <= self.max_batch_size or not 1 <= rectangle.length <= self.max_seq_len:
                raise _refuse(
                    f"generation profile {rectangle.batch} x {rectangle.length} is outside max_batch_size "
                    f"{self.max_batch_size} x max_seq_len {self.max_seq_len}",
                    "raise the limits or shrink the profile",
                )
        if max(rectangle.length for rectangle in self.generation) < self.max_seq_len:
            raise _refuse(
                f"no generation profile reaches max_seq_len {self.max_seq_len}",
                "add one of a small batch and that length, or lower max_seq_len",
            )
        needed = self.table_width(self.max_seq_len) + 1
        if self.max_blocks < needed:
            raise _refuse(
                f"max_blocks {self.max_blocks} cannot hold one sequence of {self.max_seq_len} tokens, which needs "
                f"{needed} blocks of {self.block_size} (one is reserved for padding)",
                "raise max_blocks or lower max_seq_len",
            )

    def table_width(self, length: int) -> int:
        """Blocks that a sequence of this length fills."""
        return -(-length // self.block_size)

    @property
    def context_batch(self) -> int:
        """Sequences of one context step: as many as the generation phase holds at full length, so that the context
        profile's gathered pages need no more workspace than a generation profile's."""
        return max(rectangle.batch for rectangle in self.generation if rectangle.length == self.max_seq_len)

    @property
    def chunk(self) -> int:
        """Rows of the longest chunk of a context step."""
        wanted = self.max_chunk or PADDED_ROWS * self.max_num_tokens // self.context_batch
        return max(1, min(wanted, self.max_num_tokens, self.max_seq_len))

    def profiles(self) -> tuple[Profile, ...]:
        """The context profile, then the generation profiles in the order given."""
        return (self._context(), *(self._generation(rectangle) for rectangle in self.generation))

    def _context(self) -> Profile:
        batch, chunk = self.context_batch, self.chunk
        tokens = min(self.max_num_tokens, batch * chunk)
        width = self.table_width(self.max_seq_len)
        # Preferred: a step full of whole chunks, half of the longest context before them.
        busy = max(1, tokens // chunk)
        return self._profile(
            "context",
            "context",
            optimum={"T": tokens, "B": busy, "Q": chunk, "MB": max(1, width // 2), "N": busy},
            maximum={"T": tokens, "B": batch, "Q": chunk, "MB": width, "N": batch},
        )

    def _generation(self, rectangle: Rectangle) -> Profile:
        batch, width = rectangle.batch, self.table_width(rectangle.length)
        return self._profile(
            f"generation {batch} x {rectangle.length}",
            "generation",
            optimum={"T": batch, "B": batch, "Q": 1, "MB": max(1, width // 2), "N": batch},
            maximum={"T": batch, "B": batch, "Q": 1, "MB": width, "N": batch},
        )

    def _profile(self, name: str, phase: str, *, optimum: dict[str, int], maximum: dict[str, int]) -> Profile:
        minimum = dict.fromkeys(maximum, 1) | {"NB": 1}
        blocks = {"NB": self.max_blocks}
        return Profile(name=name, phase=phase, minimum=minimum, optimum=optimum | blocks, maximum=maximum | blocks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BuildLimits:
        """The reverse of `to_json`, after a trip through JSON text."""
        rectangles = tuple(Rectangle(**rectangle) for rectangle in values["generation"])
        return cls(**{**values, "generation": rectangles})


def _refuse(problem: str, hint: str) -> CompatibilityError:
    return CompatibilityError(problem, hint=hint)
