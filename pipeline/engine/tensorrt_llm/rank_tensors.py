"""All tensors of one rank, in the order of its file: layers counted from the rank's first, experts as one stack, the
embedding and the head padded to equal parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline.checkpoint.layouts.scales import CACHE_SCALES, find_format
from pipeline.checkpoint.tensors import DTYPES, RawTensor, TensorInfo
from pipeline.engine.tensorrt_llm.rank_experts import fuse
from pipeline.engine.tensorrt_llm.rank_linears import RankWeights, list_tensors
from pipeline.engine.tensorrt_llm.rank_sizes import share_out
from pipeline.engine.tensorrt_llm.repeated_heads import repeat_heads_of
from pipeline.network.derived import Derived
from pipeline.sharding import experts, layers, slice_source

if TYPE_CHECKING:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.engine.tensorrt_llm.rank_linears import Bytes, Tensors
    from pipeline.engine.tensorrt_llm.rank_quantization import RankQuantization
    from pipeline.sharding import Rank

LAYERS = "transformer.layers."
EMBEDDING, FINAL_NORM, HEAD = "transformer.vocab_embedding.weight", "transformer.ln_f.weight", "lm_head.weight"
ATTENTION = ("attention.qkv", "attention.dense")
DENSE_MLP = ("mlp.fc", "mlp.gate", "mlp.proj")
ROUTER = "mlp.router.weight"
# up_proj (w3), then gate_proj (w1): the engine checkpoint's gate, then its fc.
FUSED_MLP = {"fc": ("gate", "fc"), "proj": ("proj",)}
PIECE = 8 << 20  # bytes of the vocabulary's matrices that are mapped at once


def list_rank_tensors(
    source: CheckpointFolder, rank: Rank, quantization: RankQuantization, *, dtype: str, sm: int
) -> dict[str, Derived]:
    """Name in the rank's file -> its bytes, made when asked for. `source` is what `check_support` let pass."""
    a, parallel = source.architecture, rank.parallel
    shaped = share_out(a, parallel)
    sliced = slice_source(_Layers(repeat_heads_of(source, a, shaped.num_kv_heads)), shaped, rank)
    weights = RankWeights(source=sliced, dtype=dtype, quantization=quantization, sm=sm)
    first, last = layers(a, rank)
    found: dict[str, Derived] = {}
    if rank.pipeline == 0:
        found[EMBEDDING] = _cut_vocabulary(source, EMBEDDING, rank)
    for layer in range(first, last):
        tensors = _list_layer(weights, f"{LAYERS}{layer}.", experts(a, rank) if a.is_routed(layer) else None)
        found |= {f"{LAYERS}{layer - first}.{name}": tensor for name, tensor in tensors}
    if rank.pipeline == parallel.pipeline - 1:
        norm = source.tensors[FINAL_NORM]
        found[FINAL_NORM] = weights.make(norm.dtype, norm.shape, (), lambda: source.read(FINAL_NORM).data)
        found[HEAD] = _cut_vocabulary(source, HEAD if HEAD in source.tensors else EMBEDDING, rank)
    return found


def _list_layer(weights: RankWeights, layer: str, held: Sequence[int] | None) -> Iterator[tuple[str, Derived]]:
    """(name within the layer, tensor); `held`: the rank's experts, of a routed layer."""
    yield "input_layernorm.weight", weights.pass_on(f"{layer}input_layernorm.weight")
    for name in ATTENTION if held is not None else ATTENTION + DENSE_MLP:
        yield from _name(name, list_tensors(weights, layer + name, find_format(weights.source.tensors, layer + name)))
    if held is not None:
        yield ROUTER, _widen(weights, layer + ROUTER)
        for name, parts in FUSED_MLP.items():
            each = [[f"{layer}mlp.experts.{expert}.{part}" for part in parts] for expert in held]
            yield from _name(f"mlp.{name}", fuse(weights, each, stacked=True))
            shared = [[f"{layer}mlp.shared_expert.{part}" for part in parts]]
            yield from _name(f"mlp.shared_expert.{name}", fuse(weights, shared, stacked=False))
    yield "post_layernorm.weight", weights.pass_on(f"{layer}post_layernorm.weight")
    if layer + CACHE_SCALES in weights.source.tensors:
        yield CACHE_SCALES, weights.pass_on(layer + CACHE_SCALES)


def _name(base: str, tensors: Tensors) -> Iterator[tuple[str, Derived]]:
    for kind, tensor in tensors.items():
        yield f"{base}.{kind}", tensor


def _widen(weights: RankWeights, name: str) -> Derived:
    """The router in float32."""

    def widen() -> Bytes:
        return RawTensor.from_torch(weights.source.read(name).to_torch().float()).data

    return weights.make("F32", weights.source.tensors[name].shape, (name,), widen)


def _cut_vocabulary(source: CheckpointFolder, name: str, rank: Rank) -> Derived:
    """The rank's rows of a [V, H] matrix, [ceil(V/t), H]: zeros after the last."""
    info = source.tensors[name]
    rows, columns = info.shape
    share = -(-rows // rank.parallel.tensor)
    width = columns * DTYPES[info.dtype][0]
    begin = min(rank.tensor * share, rows) * width
    end = min((rank.tensor + 1) * share, rows) * width

    def pieces() -> Iterator[Bytes]:
        for start in range(begin, end, PIECE):
            stop = min(start + PIECE, end)
            yield source.read(name).data[start:stop]
            source.release(name, start, stop)
        if end - begin < share * width:
            yield np.zeros(share * width - (end - begin), np.uint8)

    return Derived(info.dtype, (share, columns), pieces)


class _Layers:
    """A source without what surrounds its layers."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in source.tensors.items() if name.startswith(LAYERS)
        }

    def read(self, name: str) -> RawTensor:
        return self.source.read(name)

    def release(self, name: str) -> None:
        release = getattr(self.source, "release", None)
        if release is not None:
            release(name)
