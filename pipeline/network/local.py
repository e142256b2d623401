"""Numbers of something that ranks share out, as one of them sees it."""

from __future__ import annotations

import numpy as np

from pipeline.network.graph import Graph, Tensor


def keep_own(g: Graph, ids: Tensor, first: int | Tensor, count: int | Tensor) -> tuple[Tensor, Tensor]:
    """ids, int32 → ids - first, and bool: which of them are in [0, count); the others are 0. `first` and `count`:
    int32 tensors of as many dimensions as `ids`, or numbers."""
    first, count = (
        value if not isinstance(value, int) else g.number(name, np.full((1,) * len(ids.shape), value), "int32")
        for name, value in (("first", first), ("count", count))
    )
    places = g.elementwise("places", ids, first, "SUB")
    below = g.number("below", np.full((1,) * len(ids.shape), -1), "int32")
    inside = g.elementwise(
        "inside",
        g.elementwise("from_first", places, below, "GREATER"),
        g.elementwise("to_last", places, count, "LESS"),
        "AND",
    )
    return g.product("own", places, g.cast("inside_as_number", inside, "int32")), inside
