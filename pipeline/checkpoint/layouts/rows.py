"""How an architecture's tensors are called on the hub and in the engine checkpoint: rows of data, read both ways.

A row says which source tensors, put one below the other (concatenated along dim 0), make which target. Names carry
`{l}` for the layer, `{e}` for the expert and `{m}` for a layer counted from the end of the decoder; sizes are names of
the layout's dimensions, so that a tensor of the wrong shape is reported with the keys of config.json that it
contradicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Where a row applies: once, or in every (dense, routed) decoder layer, or for every routed expert of one.
MODEL, LAYER, DENSE, ROUTED, EXPERT = "model", "layer", "dense", "routed", "expert"
# Of the targets of layers beyond the decoder's, for multi-token prediction.
MTP_PREFIX = "transformer.mtp_layers."


@dataclass(frozen=True, slots=True)
class Dimension:
    """A size, and how config.json's keys give it ("num_attention_heads * head_dim")."""

    size: int
    keys: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`rows` names one dimension per source, `columns` the one they share (empty for vectors)."""

    target: str
    sources: tuple[str, ...]
    rows: tuple[str, ...]
    columns: str = ""
    role: str
    where: str
    when: str = ""  # a flag that the layout must have; empty: always
    optional: bool = False  # the sources may be absent (all of them), then so is the target
    cast: bool = True  # to the type that conversion is asked for; False keeps the source's
    mtp: bool = (
        False  # applies to the layers after the decoder's (multi-token prediction), and to none of the decoder's
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """A row at one layer and expert: HF tensors `sources` <-> engine tensor `target`. `keys` explains the shapes."""

    target: str
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    target_shape: tuple[int, ...]
    role: str
    layer: int | None
    expert: int | None
    optional: bool
    keys: tuple[str, ...]
    cast: bool = True

    def forward(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Source tensors, in the order of `sources`, to the target; shares memory where there is but one."""
        import torch

        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def backward(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The target back to its sources, as views."""
        import torch

        return list(torch.split(whole, [shape[0] for shape in self.source_shapes]))

    @property
    def elements(self) -> int:
        return math.prod(self.target_shape)


def vector(
    target: str, source: str, rows: str, *, role: str, where: str, when: str = "", cast: bool = True
) -> list[Row]:
    """One tensor [rows]: a norm."""
    return [Row(target=target, sources=(source,), rows=(rows,), role=role, where=where, when=when, cast=cast)]


def linear(
    target: str,
    sources: Sequence[str],
    rows: Sequence[str],
    columns: str,
    *,
    role: str,
    where: str = LAYER,
    when: str = "",
    bias: str = "",
) -> list[Row]:
    """`X.weight` [sum of rows, columns] from each source's `.weight`; likewise `.bias`, given the flag `bias`."""
    weight = Row(
        target=f"{target}.weight",
        sources=tuple(f"{source}.weight" for source in sources),
        rows=tuple(rows),
        columns=columns,
        role=role,
        where=where,
        when=when,
    )
    if not bias:
        return [weight]
    names = tuple(f"{source}.bias" for source in sources)
    return [
        weight,
        Row(target=f"{target}.bias", sources=names, rows=tuple(rows), role=role, where=where, when=bias),
    ]
