"""What `network_proof` finds of a network: how far it is from `transformers`, and what rounding in it changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeProof:
    """Both in fp32, the largest absolute differences of logits: from `transformers`, and from the network with plugins;
    infinite where no position was compared."""

    plugins: tuple[str, ...]
    max_logit_error: float
    max_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingProof:
    """What it changes that something is held or sent in `kind`: a position's RMS difference of the logits, all in fp32,
    from those without, over the RMS of all: the median position's."""

    kind: str
    error: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksProof:
    """The same of the networks of `world` ranks together: from `transformers`, and from the network of one rank."""

    world: int
    max_logit_error: float
    max_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProof:
    """Largest absolute differences from `transformers` at the `positions` compared, infinite where there were none;
    `left_out` counts positions where a router's choice was closer than the margin.

    `declared_error` is a position's RMS difference of the declared-type logits from the exact ones over the RMS of all
    exact ones: the median position's, since where a rounding tips a router to another expert the difference says
    nothing of rounding. `declared_layer_errors` is the same of each layer's output.

    Of a network with plugins, `native` says how the same network without any did, `cache` what a quantized cache
    changes; of a parallel model, `ranks` how its ranks' did, `native_ranks` without the plugin by which they exchange
    rows, and `payload` what it changes that they do in FP8."""

    max_logit_error: float
    layer_errors: list[float]
    positions: int
    left_out: int
    declared_error: float
    declared_layer_errors: list[float]
    declared_bound: float
    steps: int
    mixed_steps: int
    native: NativeProof | None = None
    cache: RoundingProof | None = None
    ranks: RanksProof | None = None
    native_ranks: RanksProof | None = None
    payload: RoundingProof | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> NetworkProof:
        """Of `asdict`'s entries, which may have others beside them."""
        kinds = {
            "native": NativeProof,
            "cache": RoundingProof,
            "ranks": RanksProof,
            "native_ranks": RanksProof,
            "payload": RoundingProof,
        }
        values = {field.name: record[field.name] for field in fields(cls)}
        return cls(**values | {name: kind(**values[name]) for name, kind in kinds.items() if values[name]})

    @property
    def worst_layer(self) -> int:
        return find_worst(self.layer_errors)

    @property
    def worst_declared_layer(self) -> int:
        return find_worst(self.declared_layer_errors)


def find_broken(errors: Sequence[float]) -> int | None:
    """The first layer whose error is not finite."""
    return next((i for i, error in enumerate(errors) if not math.isfinite(error)), None)


def find_largest(errors: Sequence[float]) -> int:
    """The first layer whose error is not finite, else the one whose is largest."""
    broken = find_broken(errors)
    return errors.index(max(errors)) if broken is None else broken


def find_worst(errors: Sequence[float]) -> int:
    """The first layer whose error is not finite, else the one that adds most to what it was given."""
    growth = [after - before for before, after in itertools.pairwise([0.0, *errors])]
    broken = find_broken(errors)
    return growth.index(max(growth)) if broken is None else broken
