"""How many linears of each kind are held how, and what each takes: for `plan`, which counts by kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.checkpoint.foreign.holding import Held, Holding
from pipeline.quantization.catalog import FLOAT32, FOREIGN_FORMATS, FORMATS

if TYPE_CHECKING:
    from pipeline.checkpoint.layouts import Kind

# Of the kinds of which another tool has quantized any, by the first tensor's name: how many are held how, the type
# being all that is told apart; None: in 16 bits.
HeldKinds = Mapping[str, Mapping[Held | None, int]]


def count_kinds(kinds: Sequence[Kind], holding: Holding) -> HeldKinds:
    """What becomes of all linears of these kinds."""
    found = {name: each.kind if isinstance(each, Held) else None for name, each in holding.items()}
    if not any(found.values()):
        return {}
    counted = {kind.first.target: Counter(found.get(name) for name in kind.names()) for kind in kinds}
    return {name: counts for name, counts in counted.items() if any(counts)}


def count_bytes(held: Held, shape: Sequence[int], *, vector_bytes: int) -> int:
    """Of a linear [out, in] in an engine checkpoint: its weight, its scales, and what its input is multiplied by,
    `vector_bytes` each."""
    row = (FORMATS | FOREIGN_FORMATS)[held.format]
    return row.nbytes(shape, held.group) + _count_inputs(held, shape, vector_bytes)


def count_engine_bytes(held: Held, shape: Sequence[int], dtype_bytes: int) -> int:
    """The same in an engine whose model's type has `dtype_bytes`."""
    row = (FORMATS | FOREIGN_FORMATS)[held.format]
    return row.engine_nbytes(shape, held.group, dtype_bytes) + _count_inputs(held, shape, dtype_bytes)


def _count_inputs(held: Held, shape: Sequence[int], vector_bytes: int) -> int:
    step = FLOAT32 if held.rounds and not (FORMATS | FOREIGN_FORMATS)[held.format].static_inputs else 0
    return shape[1] * vector_bytes * held.prescaled + step
