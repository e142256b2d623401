"""The paged KV cache with TensorRT's own layers: append to the pool, gather the pages, and the mask for them.

The block pool itself is the cache of `kv_cache_update`: what is a batch entry there is a block here, and the packed
form writes to each block the rows that `update_lengths` counts for it, from `write_indices` on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.checkpoint.layouts.scales import CACHE_SCALES
from pipeline.errors import CheckpointError
from pipeline.network import inputs
from pipeline.network.context import Context
from pipeline.network.derived import Derived
from pipeline.network.graph import Graph, Tensor
from pipeline.network.inputs import Port
from pipeline.network.weights.steps import read_scales


def append(g: Graph, context: Context, pool: Port, rows: Tensor) -> Tensor:
    """Writes rows [T, heads, width] into a pool, which is an input and, under its "_out" name, an output at the same
    address. → the pool as the rest of the step sees it."""
    updated = g.update_cache(
        f"{pool.name}.append",
        context.inputs[pool.name],
        rows,
        context.inputs[inputs.WRITE_INDICES.name],
        context.inputs[inputs.UPDATE_LENGTHS.name],
    )
    g.output(pool.name + inputs.POOL_OUTPUT_SUFFIX, updated)
    return updated


def scales(g: Graph, context: Context, layer: int, shape: tuple[int, ...]) -> list[Tensor]:
    """The scales of a layer's quantized pools as its plugins take them, which of the checkpoint's one number; none of
    wide pools. Raises CheckpointError where the checkpoint has none."""
    kind, base = context.spec.kv_cache, f"transformer.layers.{layer}"
    if kind == "model":
        return []
    if not context.weights.has(f"{base}.{CACHE_SCALES}"):
        raise CheckpointError(
            f"tensor {base}.{CACHE_SCALES} is missing, which a KV cache in {kind} needs",
            hint=f"quantize the checkpoint with stages.quantize.kv_cache: {kind}",
        )
    step = read_scales(context.weights, base, CACHE_SCALES, (1,)).data.view(np.float32)
    whole = np.full(shape, step[0], np.float32).reshape(-1).view(np.uint8)
    return [g.constant("kv_cache_scaling_factor", Derived("F32", shape, lambda: iter((whole,))))]


def plugin(
    g: Graph, context: Context, name: str, data: Sequence[Tensor], pools: Sequence[Port], scales: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """A layer's plugin `name` that writes to pools itself: of `data`, where its rows go, the pools and their scales →
    its outputs, the pools as the rest of the step sees them at the end."""
    step = [context.inputs[port.name] for port in (inputs.POSITION_IDS, *inputs.PLACES)]
    written = [context.inputs[pool.name] for pool in pools]
    outputs = g.plugin(name, context.plugins[name], [*data, *step, *written, *scales])
    for pool, updated in zip(pools, outputs[-len(pools) :], strict=True):
        g.output(pool.name + inputs.POOL_OUTPUT_SUFFIX, updated)
    return tuple(outputs)


def steps(context: Context) -> list[Tensor]:
    """What a plugin needs in order to find each sequence's rows and pages."""
    return [context.inputs[port.name] for port in (inputs.SLOT_IDS, inputs.PAD_INDEX, inputs.BLOCK_TABLES)]


def pages(g: Graph, context: Context, pool: Port, updated: Tensor) -> Tensor:
    """The blocks of each sequence side by side: [B, heads, K, width], K = MB * block_size."""
    _, heads, _, width = pool.shape
    gathered = g.gather(f"{pool.name}.gather", updated, context.inputs[inputs.BLOCK_TABLES.name])
    order = None if heads == 1 else (0, 2, 1, 3, 4)  # [B, MB, heads, block, width]: one head needs no transposition
    return g.reshape(f"{pool.name}.pages", gathered, (0, heads, -1, width), first=order)


def attention_mask(g: Graph, step: dict[str, Tensor], block_size: int, rows_per_query: int) -> Tensor:
    """bool [B, 1, Q * rows_per_query, K], true where a key's place in the cache is not after the query's.

    Built here, so that nothing of that size is uploaded. rows_per_query: how many rows of the attention one query
    makes (MLA folds its heads into rows), next to each other.
    """
    slots = g.gather("query_slots", step[inputs.SLOT_IDS.name], step[inputs.PAD_INDEX.name])
    if rows_per_query > 1:
        copies = g.number("copies", [[[0] * rows_per_query]], "int32")
        slots = g.sum("query_slot_copies", g.reshape("query_slots_column", slots, (0, 0, 1)), copies)
    slots = g.reshape("query_slots_padded", slots, (0, 1, -1, 1))
    sizes = g.shape("table_shape", step[inputs.BLOCK_TABLES.name])
    columns = g.slice("table_columns", sizes, 0, 1, 1)
    keys = g.count_up("key_slots", g.product("num_keys", columns, g.number("block_size", [block_size], "int64")))
    later = g.elementwise("later", g.reshape("key_slots_row", keys, (1, 1, 1, -1)), slots, "GREATER")
    return g.unary("allowed", later, "NOT")
