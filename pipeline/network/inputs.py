"""The engine's inputs, outputs and pools: declared here only, read by the network, the runners and the builder.

Sizes by name:
    T   packed rows (tokens) of this step            B   sequences of this step
    Q   rows of the longest sequence's chunk         MB  columns of the block table
    NB  blocks of each pool                          N   rows whose logits are wanted
Rows are in (block, offset) order: `kv_cache_update` appends a block's new rows one after another, so the host sorts the
rows once instead of the graph permuting them. Block 0 belongs to no sequence: tables are padded with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.sharding.sizes import local_sizes

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.network.spec import NetworkSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output: `axes` holds a number for a fixed size, a name ("T", "NB+1") for one that a step chooses."""

    name: str
    dtype: str
    axes: tuple[int | str, ...]
    meaning: str

    @property
    def shape(self) -> tuple[int, ...]:
        """With -1 for every size that a step chooses, as TensorRT wants it."""
        return tuple(-1 if isinstance(axis, str) else axis for axis in self.axes)

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape for given sizes, {"T": 8, "NB": 100, …}."""
        shape = []
        for axis in self.axes:
            name, _, more = str(axis).partition("+")
            shape.append(axis if isinstance(axis, int) else sizes[name] + int(more or 0))
        return tuple(shape)


def _int32(name: str, axes: tuple[str, ...], meaning: str) -> Port:
    return Port(name=name, dtype="int32", axes=axes, meaning=meaning)


INPUT_IDS = _int32("input_ids", ("T",), "token of each row")
POSITION_IDS = _int32("position_ids", ("T",), "position of each row, for RoPE")
SLOT_IDS = _int32("slot_ids", ("T",), "place of each row in its sequence's cache, for the mask")
UPDATE_LENGTHS = _int32("update_lengths", ("NB+1",), "rows written to the blocks before this one, cumulative, from 0")
WRITE_INDICES = _int32("write_indices", ("NB",), "offset of the first row written to each block")
BLOCK_TABLES = _int32("block_tables", ("B", "MB"), "blocks of each sequence, padded with block 0")
PAD_INDEX = _int32("pad_index", ("B", "Q"), "row of T for each sequence and query, padded with the sequence's last row")
UNPAD_INDEX = _int32("unpad_index", ("T",), "place of each row in the flattened [B, Q]")
LOGIT_ROWS = _int32("logit_rows", ("N",), "rows of T whose logits are wanted")

STEP_INPUTS = (
    INPUT_IDS,
    POSITION_IDS,
    SLOT_IDS,
    UPDATE_LENGTHS,
    WRITE_INDICES,
    BLOCK_TABLES,
    PAD_INDEX,
    UNPAD_INDEX,
    LOGIT_ROWS,
)
# Where each row's place in the pools is found, without the order of the rows: for plugins.
PLACES = (SLOT_IDS, UNPAD_INDEX, PAD_INDEX, BLOCK_TABLES)
HIDDEN_STATES = "hidden_states"
HIDDEN_STATES_OUT = "hidden_states_out"
LOGITS = "logits"
POOL_OUTPUT_SUFFIX = "_out"


def layer_output(layer: int) -> str:
    """Name of a decoder layer's output tensor, for taps."""
    return f"layers.{layer}.output"


def layer_pools(architecture: Architecture, spec: NetworkSpec, layer: int) -> tuple[Port, ...]:
    """One layer's pools [NB, heads, block_size, width]: K and V, or MLA's one latent. All zero at allocation: a masked
    row that is not finite would still poison the attention (0 * NaN)."""
    names = {1: ("latent_pool",), 2: ("k_pool", "v_pool")}[len(architecture.cache_widths)]
    heads = local_sizes(architecture, spec.rank).kv_heads
    return tuple(
        Port(
            name=f"{name}_{layer}",
            dtype=spec.pool_dtype,
            axes=("NB", heads, spec.block_size, width),
            meaning="paged cache, updated in place",
        )
        for name, (_, width) in zip(names, architecture.cache_widths, strict=True)
    )


def pools(architecture: Architecture, spec: NetworkSpec) -> tuple[Port, ...]:
    """The pools of every layer in the network's slice."""
    return tuple(p for layer in range(*spec.layer_range(architecture)) for p in layer_pools(architecture, spec, layer))


def step_inputs(architecture: Architecture, spec: NetworkSpec) -> tuple[Port, ...]:
    """What a step feeds besides the pools. A slice that does not start at layer 0 takes hidden states, not tokens; one
    that ends before the last layer has no logits to choose."""
    first, last = spec.layer_range(architecture)
    ports = [port for port in STEP_INPUTS if port not in (INPUT_IDS, LOGIT_ROWS)]
    hidden = Port(
        name=HIDDEN_STATES, dtype=spec.dtype, axes=("T", architecture.hidden_size), meaning="output of the layer before"
    )
    ports.insert(0, INPUT_IDS if first == 0 else hidden)
    if last == architecture.num_layers:
        ports.append(LOGIT_ROWS)
    return tuple(ports)


def result(architecture: Architecture, spec: NetworkSpec) -> Port:
    """The network's output besides the pools: logits, or the hidden states of a slice that ends early."""
    if spec.layer_range(architecture)[1] == architecture.num_layers:
        return Port(
            name=LOGITS, dtype="float32", axes=("N", architecture.vocab_size), meaning="logits of the rows asked for"
        )
    return Port(
        name=HIDDEN_STATES_OUT,
        dtype=spec.dtype,
        axes=("T", architecture.hidden_size),
        meaning="output of the slice's last layer",
    )


def network_inputs(architecture: Architecture, spec: NetworkSpec) -> tuple[Port, ...]:
    """Every input, in the network's order: the step's, then the pools."""
    return step_inputs(architecture, spec) + pools(architecture, spec)


def network_outputs(architecture: Architecture, spec: NetworkSpec) -> tuple[Port, ...]:
    """Every output: the result, then each pool, which shares its input's address."""
    updated = tuple(
        Port(name=p.name + POOL_OUTPUT_SUFFIX, dtype=p.dtype, axes=p.axes, meaning=p.meaning)
        for p in pools(architecture, spec)
    )
    return (result(architecture, spec), *updated)
