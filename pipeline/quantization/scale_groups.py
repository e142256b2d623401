"""AWQ's scale groups as data: which linears read one input, where that input is seen, and where 1/s can be folded.

A scale s per input channel multiplies the columns of every linear of a group; the input must then be divided by s.
Where one tensor makes that input channel by channel (a norm's weights, the rows of a linear before it), dividing its
rows by s costs nothing at run time. Folding is right only if *all* readers of that tensor are compensated: the router
reads the experts' input, so there s stays a vector beside the weights (`prequant_scaling_factor` = 1/s).

Names are the engine checkpoint's, relative to a decoder layer (if any): mlp.fc is HF's gate_proj, mlp.gate its up_proj.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from pipeline.checkpoint.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Fold:
    """The tensor whose rows are divided by s, and which rows: a key of ROWS."""

    producer: str
    rows: str = "all"


@dataclass(frozen=True, slots=True)
class Row:
    """Linears that read one input. `seen_at`: the HF module, relative to the layer, whose argument that input is."""

    linears: tuple[str, ...]
    seen_at: str
    fold: Fold | None = None


LLAMA_ATTENTION = (
    Row(("attention.qkv",), "self_attn.q_proj", Fold("input_layernorm")),
    Row(("attention.dense",), "self_attn.o_proj", Fold("attention.qkv", "values")),
)
LATENT_ATTENTION = (
    # kv_a reads the same norm and stays 16-bit, so this scale stays a vector.
    Row(
        ("attention.q_proj", "attention.q_a_proj", "attention.kv_a_proj_with_mqa"),
        "self_attn.kv_a_proj_with_mqa",
        Fold("input_layernorm"),
    ),
    Row(("attention.q_b_proj",), "self_attn.q_b_proj", Fold("attention.q_a_layernorm")),
    Row(("attention.dense",), "self_attn.o_proj", Fold("attention.kv_b_proj", "latent_values")),
)
DENSE_MLP = (
    Row(("mlp.fc", "mlp.gate"), "mlp.gate_proj", Fold("post_layernorm")),
    Row(("mlp.proj",), "mlp.down_proj", Fold("mlp.gate")),
)
ROUTED_MLP = (
    # One scale for all experts: a batched lowering scales the layer's input once.
    Row(("mlp.experts.{all}.fc", "mlp.experts.{all}.gate"), "mlp.experts"),
    Row(("mlp.experts.{each}.proj",), "mlp.experts", Fold("mlp.experts.{each}.gate")),
    Row(("mlp.shared_expert.fc", "mlp.shared_expert.gate"), "mlp.shared_experts.gate_proj"),
    Row(("mlp.shared_expert.proj",), "mlp.shared_experts.down_proj", Fold("mlp.shared_expert.gate")),
)
# Behind the layers, where no module's input is seen.
HEAD = (Row(("lm_head",), ""),)


def _all_rows(architecture: Architecture) -> slice:
    return slice(None)


def _value_rows(architecture: Architecture) -> slice | None:
    """V's rows of qkv: input channel (head, d) of dense is row (head, d) of V only without grouped queries."""
    a = architecture
    if a.num_kv_heads != a.num_heads:
        return None
    return slice((a.num_heads + a.num_kv_heads) * a.head_dim, None)


def _latent_value_rows(architecture: Architecture) -> Tensor | None:
    """V's rows of kv_b_proj, whose rows are, head by head, keys (nope) then values."""
    import torch

    latent = architecture.latent
    if latent is None:
        return None
    per_head = latent.qk_nope_head_dim + latent.v_head_dim
    rows = torch.arange(architecture.num_heads * per_head).view(architecture.num_heads, per_head)
    return rows[:, latent.qk_nope_head_dim :].reshape(-1)


ROWS: dict[str, Callable[[Architecture], slice | Tensor | None]] = {
    "all": _all_rows,
    "values": _value_rows,
    "latent_values": _latent_value_rows,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedFold:
    """`rows` of the tensor `producer` (full name, without ".weight") are to be divided by s."""

    producer: str
    rows: slice | Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleGroup:
    """One scale vector of one layer: the linears to quantize that share it, and its fold (None: kept as a vector)."""

    name: str
    linears: tuple[str, ...]
    seen_at: str
    fold: ResolvedFold | None
    expert: int | None = None


def scale_groups(
    architecture: Architecture, layer: int | None, present: Collection[str], quantized: Collection[str]
) -> list[ScaleGroup]:
    """The groups of a decoder layer, or (None) of what surrounds them. `present` and `quantized` are full names of
    linears, without ".weight".

    Groups without a quantized linear are left out. One that also has linears that stay 16-bit is not folded: rounding
    their scaled columns would cost them precision.
    """
    groups = []
    for row in _rows(architecture, layer):
        for expert in _experts(row, architecture):
            linears = [name for name in _expand(row, architecture, layer, expert) if name in present]
            chosen = tuple(name for name in linears if name in quantized)
            if not chosen:
                continue
            fold = _resolve(row.fold, architecture, layer, expert) if len(chosen) == len(linears) else None
            groups.append(
                ScaleGroup(
                    name=_prefix(layer) + row.linears[0].format(all="*") if "{all}" in row.linears[0] else chosen[0],
                    linears=chosen,
                    seen_at=row.seen_at,
                    fold=fold,
                    expert=expert,
                )
            )
    return groups


def _rows(architecture: Architecture, layer: int | None) -> tuple[Row, ...]:
    if layer is None:
        return HEAD
    attention = LLAMA_ATTENTION if architecture.latent is None else LATENT_ATTENTION
    routed = architecture.is_routed(layer) and architecture.experts is not None
    return attention + (ROUTED_MLP if routed else DENSE_MLP)


def _prefix(layer: int | None) -> str:
    return "" if layer is None else f"transformer.layers.{layer}."


def _experts(row: Row, architecture: Architecture) -> list[int | None]:
    """One group per expert, or one in all."""
    if "{each}" not in row.linears[0] or architecture.experts is None:
        return [None]
    return list(range(architecture.experts.num_routed))


def _expand(row: Row, architecture: Architecture, layer: int | None, expert: int | None) -> list[str]:
    if "{all}" in row.linears[0] and architecture.experts is not None:
        every = range(architecture.experts.num_routed)
        return [_prefix(layer) + name.format(all=e) for e in every for name in row.linears]
    return [_prefix(layer) + name.format(each=expert) for name in row.linears]


def _resolve(
    fold: Fold | None, architecture: Architecture, layer: int | None, expert: int | None
) -> ResolvedFold | None:
    rows = ROWS[fold.rows](architecture) if fold is not None else None
    if fold is None or rows is None:
        return None
    return ResolvedFold(producer=_prefix(layer) + fold.producer.format(each=expert), rows=rows)
