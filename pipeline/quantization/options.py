"""What mixed precision chooses from, what for, and at what effort it measures; without torch, for the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.quantization.catalog import FORMATS, GROUP_SIZES, METHODS
from pipeline.quantization.selection import Decision, Rules, fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A budget of one `kind`. "size_ratio": the checkpoint's size over its size before; "bits_per_weight": the units'
    own, scales included; "kl": nats per token, at the smallest size."""

    kind: str
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """`samples` pieces of text of `length` tokens, and `draws` tokens drawn at each position for the gradients."""

    samples: int = 32
    length: int = 128
    draws: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to store a unit: a key of METHODS or "none", and the group asked for of a grouped format."""

    method: str
    group_size: int | None = None

    @property
    def name(self) -> str:
        return self.method if self.group_size is None else f"{self.method}/{self.group_size}"

    def fit(self, shape: Sequence[int]) -> Decision | str:
        """Of a method other than "none": what becomes of a linear [out, in], or why its shape does not allow it."""
        return fit(self.method, shape, self.group_size or max(GROUP_SIZES))

    @staticmethod
    def parse(name: str) -> Candidate:
        method, _, size = name.partition("/")
        return Candidate(method=method, group_size=int(size) if size else None)


def list_candidates(rules: Rules, formats: Sequence[str], *, search: bool) -> list[Candidate]:
    """The config's own method and group first, then each format of `formats` (keys of FORMATS) by one method and in
    each group size; "none" is always one and costs nothing.

    With `search` a method that measures does what it does; without, one that only rounds stands in for it where there
    is one for the same format, and says as much about where errors hurt at a fraction of the time.
    """
    found: dict[Candidate, None] = {}
    own = METHODS[rules.method].format if rules.method in METHODS else None
    if own is not None:
        group = rules.group_size if FORMATS[own].grouped else None
        found[Candidate(method=rules.method if search else stand_in(rules.method), group_size=group)] = None
    for name in formats:
        method = rules.method if name == own else next(m for m, row in METHODS.items() if row.format == name)
        method = method if search else stand_in(method)
        for size in GROUP_SIZES if FORMATS[name].grouped else (None,):
            found[Candidate(method=method, group_size=size)] = None
    return list(found)


def stand_in(method: str) -> str:
    """The method that only rounds to the format of `method`; itself where there is none."""
    row = METHODS[method]
    return next((m for m, other in METHODS.items() if other.format == row.format and not other.measures), method)
