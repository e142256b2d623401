"""What a caller chooses about a network, apart from the checkpoint: written to JSON, so that it can be built again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.tensors import MODEL_DTYPES
from pipeline.errors import CompatibilityError
from pipeline.sharding.ranks import Parallel, Rank
from pipeline.sharding.ranks import layers as stage_layers

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture

MOE_LOWERINGS = ("dense", "gather")
LOWERINGS = ("native", "plugin")
PAYLOADS = ("model", "fp8")
CACHES = ("model", "fp8", "int8")
CACHE_PLUGINS = ("rope_paged_kv", "paged_attention")  # what writes and reads a quantized cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """How each operation that has a plugin is written: "native", in TensorRT's own layers, or "plugin". Both compute
    the same."""

    rope_paged_kv: str = "native"
    paged_attention: str = "native"
    moe_all_to_all: str = "native"
    moe_experts: str = "native"

    def __post_init__(self) -> None:
        for operation, lowering in asdict(self).items():
            if lowering not in LOWERINGS:
                raise CompatibilityError(
                    f"lowering {lowering!r} of {operation} is unknown", hint=f"one of {', '.join(LOWERINGS)}"
                )

    def plugins(self) -> tuple[str, ...]:
        """The operations that are plugins."""
        return tuple(operation for operation, lowering in asdict(self).items() if lowering == "plugin")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """The choices behind one network.

    dtype: the model's type, float32, float16 or bfloat16: the checkpoint's own.
    block_size: rows of one cache block.
    max_seq_len: rows of the RoPE tables, the longest sequence that can be served.
    moe: how routed experts are lowered: "dense" computes every expert for every token, "gather" fetches each token's
        experts (for engines that only generate).
    expert_payload: what the moe_all_to_all plugin sends rows as: "model", as they are, or "fp8".
    kv_cache: what the pools hold: "model", the model's type, or "fp8" or "int8", with the checkpoint's scales; only in
        the plugins that read and write them.
    rank: which rank of a parallel model the network is; by default the only one.
    layers: the decoder layers [a, b) that the network holds, of its rank's pipeline stage; None for all of them.
    lowering: which operations are plugins.
    """

    dtype: str
    max_seq_len: int
    block_size: int = 64
    moe: str = "dense"
    expert_payload: str = "model"
    kv_cache: str = "model"
    rank: Rank = field(default_factory=Rank)
    layers: tuple[int, int] | None = None
    lowering: Lowering = field(default_factory=Lowering)

    def __post_init__(self) -> None:
        if self.dtype not in MODEL_DTYPES:
            raise CompatibilityError(
                f"network dtype {self.dtype!r} is unknown", hint=f"one of {', '.join(MODEL_DTYPES)}"
            )
        if self.moe not in MOE_LOWERINGS:
            raise CompatibilityError(f"moe lowering {self.moe!r} is unknown", hint=f"one of {', '.join(MOE_LOWERINGS)}")
        if self.expert_payload not in PAYLOADS:
            raise CompatibilityError(
                f"expert payload {self.expert_payload!r} is unknown", hint=f"one of {', '.join(PAYLOADS)}"
            )
        if self.kv_cache not in CACHES:
            raise CompatibilityError(f"KV cache {self.kv_cache!r} is unknown", hint=f"one of {', '.join(CACHES)}")
        missing = sorted({*CACHE_PLUGINS} - {*self.lowering.plugins()})
        if self.kv_cache != "model" and missing:
            raise CompatibilityError(
                f"a KV cache in {self.kv_cache} is the plugins', and {' and '.join(missing)} would be native",
                hint="set both under stages.build.lowering to plugin, or stages.quantize.kv_cache: none",
            )
        if self.block_size < 1 or self.max_seq_len < 1:
            raise CompatibilityError(
                f"block_size {self.block_size} and max_seq_len {self.max_seq_len} must be positive",
                hint="set both under stages.build",
            )

    @property
    def pool_dtype(self) -> str:
        """Type of the pools, in programs' spelling."""
        return self.dtype if self.kv_cache == "model" else self.kv_cache

    def layer_range(self, architecture: Architecture) -> tuple[int, int]:
        """The slice [a, b) in full. Raises CompatibilityError where it is empty or leaves the rank's layers."""
        held = stage_layers(architecture, self.rank)
        first, last = self.layers or held
        if not held[0] <= first < last <= held[1]:
            stages = self.rank.parallel.pipeline
            of = f"a model of {held[1]} layers" if stages == 1 else f"its stage's layers [{held[0]}, {held[1]})"
            raise CompatibilityError(
                f"layers [{first}, {last}) is no slice of {of}",
                hint="give a first layer and the one after the last",
            )
        return first, last

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> NetworkSpec:
        """The inverse of `to_json`. Raises CompatibilityError for an unknown or missing key."""
        values: dict[str, Any] = json.loads(text)
        known = {f.name for f in fields(cls)}
        if values.keys() - known or {"dtype", "max_seq_len"} - values.keys():
            raise CompatibilityError(
                f"network description has the keys {', '.join(sorted(values))}, not {', '.join(sorted(known))}",
                hint="it was written by another version of trtseek: package the engine again",
            )
        layers, lowering, rank = values.get("layers"), values.get("lowering", {}), values.get("rank")
        if unknown := lowering.keys() - {f.name for f in fields(Lowering)}:
            raise CompatibilityError(
                f"network description lowers {', '.join(sorted(unknown))}, which this version does not know",
                hint="it was written by another version of trtseek: package the engine again",
            )
        return cls(
            **{
                **values,
                "layers": None if layers is None else (int(layers[0]), int(layers[1])),
                "rank": Rank(Parallel(**rank["parallel"]), rank["index"]) if rank else Rank(),
                "lowering": Lowering(**lowering),
            }
        )
