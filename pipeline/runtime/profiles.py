"""Which optimization profile of an engine a step runs in, and the sizes that a generation step is padded to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import CompatibilityError
from pipeline.network import inputs as ports

if TYPE_CHECKING:
    from pipeline.engine.description import ProfileDescription

Inputs = Mapping[str, npt.NDArray[Any]]
CONTEXT, GENERATION = "context", "generation"
# Sizes by the names of network/inputs.py. N is not among what must fit: more rows of logits are had in several runs.
FITTED = ("T", "B", "Q", "MB", "NB")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One profile of an engine. most: its largest sizes, by name."""

    index: int
    name: str
    phase: str
    most: Mapping[str, int]

    def fits(self, sizes: Mapping[str, int]) -> bool:
        return all(sizes[name] <= self.most[name] for name in FITTED)

    @property
    def area(self) -> int:
        """Pages that attention may gather."""
        return self.most["B"] * self.most["MB"]


def read_profiles(descriptions: Sequence[ProfileDescription]) -> tuple[StepProfile, ...]:
    """The profiles of an engine description, in the engine's order."""
    return tuple(
        StepProfile(
            index=index,
            name=profile.name,
            phase=profile.phase,
            most=_sizes({name: shapes.maximum for name, shapes in profile.shapes.items()}),
        )
        for index, profile in enumerate(descriptions)
    )


def measure(inputs: Inputs) -> dict[str, int]:
    """A step's sizes, by name."""
    return _sizes({name: array.shape for name, array in inputs.items()})


def choose_profile(profiles: Sequence[StepProfile], sizes: Mapping[str, int]) -> StepProfile:
    """For single tokens the smallest generation profile that holds them, else a context profile. Raises
    CompatibilityError, with the sizes of all, where none does."""
    fitting = [profile for profile in profiles if profile.fits(sizes)]
    generation = [profile for profile in fitting if profile.phase == GENERATION]
    if generation:
        return min(generation, key=lambda profile: profile.area)
    if fitting:
        return fitting[0]
    held = "; ".join(f"{profile.name} {_write(profile.most)}" for profile in profiles)
    raise CompatibilityError(
        f"a step of {_write(sizes)} fits no profile of the engine: {held}",
        hint="plan steps within the limits that the engine was built for",
    )


def batch_sizes(most: int, gap: int) -> tuple[int, ...]:
    """Batches that generation steps are padded to: two per doubling, so that at most a third is padding, and each at
    most `gap` from the one before (the rows of padding are written to one block)."""
    sizes = [1]
    while sizes[-1] < most:
        step = max(1, 1 << max(0, sizes[-1].bit_length() - 2))
        sizes.append(min(sizes[-1] + min(step, gap), most))
    return tuple(sizes)


def round_batch(batch: int, most: int, gap: int) -> int:
    return next(size for size in batch_sizes(most, gap) if size >= batch)


def round_width(width: int, most: int) -> int:
    """Columns of the block table: the next power of two, so that a sequence that grows meets few sizes."""
    return min(1 << (width - 1).bit_length(), most)


def pad_generation(inputs: Inputs, *, batch: int, width: int) -> dict[str, npt.NDArray[np.int32]]:
    """A step of single tokens as one of `batch` sequences, with block tables of `width` columns.

    Each sequence of padding is token 0, alone in its context. Its row is written to block 0, which is read behind the
    mask only, and its logits come after the real ones. Block 0 is the first, so the rows of padding are, too.
    """
    tables = inputs["block_tables"]
    extra = batch - len(tables)
    new = np.zeros(extra, np.int32)
    padded = {
        **inputs,
        "block_tables": np.pad(tables, ((0, extra), (0, width - tables.shape[1]))),
        "pad_index": np.concatenate([inputs["pad_index"] + extra, np.arange(extra)[:, None]]),
        "unpad_index": np.concatenate([np.arange(batch - extra, batch), inputs["unpad_index"]]),
        "logit_rows": np.pad(inputs["logit_rows"] + extra, (0, batch - len(inputs["logit_rows"]))),
        "update_lengths": np.concatenate([[0], inputs["update_lengths"][1:] + extra]),
    }
    for name in ("input_ids", "position_ids", "slot_ids"):
        padded[name] = np.concatenate([new, inputs[name]])
    return {name: np.ascontiguousarray(array, np.int32) for name, array in padded.items()}


def split_rows(inputs: Inputs, most: int) -> list[Inputs]:
    """The step once for every `most` rows of logits that are wanted. Repeating it is harmless: it writes the same rows
    to the same places."""
    rows = inputs["logit_rows"]
    return [{**inputs, "logit_rows": rows[first : first + most]} for first in range(0, len(rows), most)]


def _sizes(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for port in ports.STEP_INPUTS:
        for axis, size in zip(port.axes, shapes[port.name], strict=True):
            if isinstance(axis, str) and "+" not in axis:
                sizes[axis] = int(size)
    return sizes


def _write(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={sizes[name]}" for name in FITTED)
