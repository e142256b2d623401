"""The tensors of a GGUF file and what they are made of: rows of the engine's, in llama.cpp's order and types.

Matrices keep the model's 16 bits; norms, biases and the router are float32, as llama.cpp wants them. INT4 is Q4_0 and
INT8 Q8_0 where that is exact (ggml_blocks.py). The experts of a layer are one tensor, of one type: one that cannot be
makes all of them 16 bits. kv_b_proj becomes two, the keys' half transposed head by head, and so is 16 bits always.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pipeline.checkpoint.hub_weights import read_dense
from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import CompatibilityError
from pipeline.exports.ggml_blocks import ENCODERS, FLOATS, Rows, refuse, row_bytes
from pipeline.exports.gguf_names import KEYS_VALUES, name_tensor, order_rows
from pipeline.exports.linear import QuantizedLinear, find_linear
from pipeline.exports.plan import REFUSE, Encoding, Plan, plan_export, widen

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.layouts import Mapping as TensorMapping

TRANSPOSED = "llama.cpp transposes the half of it that makes keys"
DIVIDED = "the experts of its layer are stored in several ways, and are one tensor here"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """`kind`: a ggml type; `shape` outermost first; `pieces` make its bytes, in order, each from one of the
    engine's `sources`; there are none where they are made up."""

    name: str
    kind: str
    shape: tuple[int, ...]
    pieces: list[Callable[[], Rows]]
    sources: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * row_bytes(self.kind, self.shape[-1])


def plan_tensors(engine: CheckpointFolder, others: str) -> Plan:
    """Which linears stay quantized. Raises as `plan_export` does."""

    def judge(linear: QuantizedLinear) -> str | None:
        return TRANSPOSED if linear.parts[0].name.endswith(KEYS_VALUES) else refuse(linear)

    # Only the verdict counts: what is written is listed below.
    verdict = Encoding(describe=lambda linear, part, dtype: [], encode=lambda numbers, dtype: [], refuse=judge)
    plan = plan_export(engine, dict.fromkeys(ENCODERS, verdict), others=others, format="gguf")
    for mapping in _list_mappings(engine, mtp=True):
        plan.left_out.append(mapping.target)
        for name in (source.removesuffix(".weight") for source in mapping.sources):
            for group in (plan.kept, plan.widened, plan.plain):
                group.pop(name, None)
    _unite_experts(plan, others)
    return plan


def list_tensors(plan: Plan) -> list[GgufTensor]:
    """Every tensor of the file, in the order of the engine checkpoint's."""
    tensors: dict[str, GgufTensor] = {}
    for mapping in _list_mappings(plan.engine, mtp=False):
        start = 0
        for source, shape in zip(mapping.sources, mapping.source_shapes, strict=True):
            rows = slice(start, start + shape[0])
            start += shape[0]
            if source.endswith(f"{KEYS_VALUES}.weight"):
                tensors |= {tensor.name: tensor for tensor in _split_keys_values(plan, mapping)}
                continue
            name, kind = name_tensor(source), _pick_kind(plan, mapping, source)
            order = order_rows(plan.engine.architecture, source, shape[0])
            piece = partial(_read_rows, plan, mapping, kind, rows, order)
            if mapping.expert is None:
                tensors[name] = GgufTensor(name=name, kind=kind, shape=shape, pieces=[piece], sources=[mapping.target])
                continue
            if name not in tensors:
                experts = plan.engine.architecture.experts
                count = experts.num_routed if experts is not None else 0
                tensors[name] = GgufTensor(name=name, kind=kind, shape=(count, *shape), pieces=[])
            tensors[name].pieces.append(piece)
            tensors[name].sources.append(mapping.target)
    return list(tensors.values())


def _list_mappings(engine: CheckpointFolder, *, mtp: bool) -> list[TensorMapping]:
    """Those of the decoder, or of its layers for multi-token prediction, that are there."""
    mappings = layout_for(engine.architecture).mappings()
    return [m for m in mappings if m.target in engine.tensors and (m.role == "mtp") == mtp]


def _unite_experts(plan: Plan, others: str) -> None:
    """Gives all experts of a stack one type."""
    stacks: dict[str, list[str]] = defaultdict(list)
    for mapping in _list_mappings(plan.engine, mtp=False):
        if mapping.expert is not None:
            stacks[name_tensor(mapping.sources[0])].append(mapping.sources[0].removesuffix(".weight"))
    for names in stacks.values():
        formats = {plan.kept[name].format if name in plan.kept else None for name in names}
        if len(formats) == 1:
            continue
        kept = [name for name in names if name in plan.kept]
        if others == REFUSE:
            raise CompatibilityError(
                f"{kept[0]} cannot be exported as gguf: {DIVIDED}",
                hint="--others 16bit writes such linears in 16 bits; or quantize all experts of a layer in one way",
            )
        for name in kept:
            del plan.kept[name]
            plan.widened[name] = DIVIDED


def _pick_kind(plan: Plan, mapping: TensorMapping, source: str) -> str:
    if len(mapping.target_shape) == 1 or mapping.role == "router":
        return "F32"
    kept = plan.kept.get(source.removesuffix(".weight"))
    if kept is not None:
        return ENCODERS[kept.format][0]
    stored = plan.engine.tensors[mapping.target].dtype
    return stored if stored in FLOATS else plan.dtype


def _read_rows(plan: Plan, mapping: TensorMapping, kind: str, rows: slice, order: npt.NDArray[np.intp] | None) -> Rows:
    """[rows, bytes of one]."""
    linear, stored = find_linear(plan.engine, mapping), plan.engine.tensors[mapping.target]
    if linear is not None and kind not in FLOATS:
        found = ENCODERS[linear.format][1](linear.read().cut(rows))
    elif stored.dtype == kind:  # the file's own bytes, not held
        found = plan.engine.read(mapping.target).data.reshape(stored.shape[0], -1)[rows]
    else:
        found = _as_bytes(_read_floats(plan, mapping, kind)[rows])
    return found if order is None else found[order]


def _split_keys_values(plan: Plan, mapping: TensorMapping) -> list[GgufTensor]:
    """[heads * (nope + value), R]: keys to [heads, R, nope], values to [heads, value, R]."""
    latent, heads = plan.engine.architecture.latent, plan.engine.architecture.num_heads
    if latent is None:
        raise ValueError(f"{mapping.target} without latent attention")
    nope, value, rank = latent.qk_nope_head_dim, latent.v_head_dim, latent.kv_lora_rank
    kind = _pick_kind(plan, mapping, mapping.sources[0])
    prefix = f"blk.{mapping.layer}."

    def keys() -> Rows:
        whole = _read_floats(plan, mapping, kind).view(heads, nope + value, rank)
        return _as_bytes(whole[:, :nope].transpose(1, 2).contiguous().view(-1, nope))

    def values() -> Rows:
        whole = _read_floats(plan, mapping, kind).view(heads, nope + value, rank)
        return _as_bytes(whole[:, nope:].contiguous().view(-1, rank))

    sources = [mapping.target]
    return [
        GgufTensor(
            name=f"{prefix}attn_k_b.weight", kind=kind, shape=(heads, rank, nope), pieces=[keys], sources=sources
        ),
        GgufTensor(
            name=f"{prefix}attn_v_b.weight", kind=kind, shape=(heads, value, rank), pieces=[values], sources=sources
        ),
    ]


def _read_floats(plan: Plan, mapping: TensorMapping, kind: str) -> torch.Tensor:
    """The target's values in a float type of ggml's, which are safetensors' by name."""
    return widen(read_dense(plan.engine, mapping), kind, mapping.target.removesuffix(".weight"))


def _as_bytes(values: torch.Tensor) -> Rows:
    raw = RawTensor.from_torch(values)
    return raw.data.reshape(values.shape[0], -1)
