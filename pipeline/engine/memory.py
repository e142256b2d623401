"""What an engine will need of the GPU's memory, before anything is converted: for `plan` and the config's checks.

Weights from weights.py, workspace from kernels.py, the KV cache from the architecture. Pure Python.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from pipeline.checkpoint.tensors import MODEL_DTYPE_BYTES
from pipeline.engine.kernels import plan_workspace
from pipeline.engine.limits import BuildLimits, Profile
from pipeline.engine.split import count_exchanged, shrink
from pipeline.engine.weights import NOTHING_HELD, estimate_weights, list_block_roles
from pipeline.engine.workspace import Workspace
from pipeline.network.inputs import Port, network_inputs, network_outputs
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.quantization.selection import NOTHING, Rules
from pipeline.sharding.ranks import Parallel

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.foreign.counting import HeldKinds

# What the CUDA context, the kernels' code and TensorRT's own objects take beside what is planned here. Not measured: no
# GPU has run these engines yet; CUDA contexts of this size are usual.
RESERVE_BYTES = 1 << 30
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Design:
    """An engine without its limits. dtype: of 16/32-bit weights and activations, and of the KV cache if kv_cache is
    "model"; else that is "fp8" or "int8". rules: which linears are quantized, and how. fp8: linears stay in the
    source's FP8 blocks. held: as another tool quantized them. moe: "dense" or "gather", where moe_experts is native."""

    architecture: Architecture
    _: KW_ONLY
    dtype: str
    rules: Rules = NOTHING
    fp8: bool = False
    held: HeldKinds = field(default_factory=lambda: NOTHING_HELD)
    moe: str = "dense"
    lowering: Lowering = Lowering()
    kv_cache: str = "model"
    parallel: Parallel = Parallel()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """GPU memory in bytes. `workspaces` goes with the limits' profiles; one execution context needs the largest."""

    weights_bytes: int
    workspaces: tuple[tuple[Profile, Workspace], ...]
    kv_bytes_per_token: int
    kv_bytes_per_block: int
    pool_bytes: int  # of max_blocks
    io_bytes: int  # step inputs and logits of the largest profile

    @property
    def workspace_bytes(self) -> int:
        return max(workspace.nbytes for _, workspace in self.workspaces)

    @property
    def total_bytes(self) -> int:
        """All of it, with the reserve for CUDA itself."""
        return self.weights_bytes + self.workspace_bytes + self.pool_bytes + self.io_bytes + RESERVE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One GPU's part of a design: what it computes, as a model of its own, and its bytes of weights. `cached`: the
    layers whose cache is counted; `exchanged`: how many GPUs' rows its experts see."""

    design: Design
    architecture: Architecture
    spec: NetworkSpec
    weights: int
    cached: int
    exchanged: int
    blocks: frozenset[str]
    ports: tuple[Port, ...]  # step inputs and the logits, without the pools

    @property
    def kv_bytes_per_token(self) -> int:
        per_layer = sum(heads * width for heads, width in self.architecture.cache_widths)
        width = MODEL_DTYPE_BYTES[self.spec.dtype] if self.design.kv_cache == "model" else 1
        return per_layer * width * self.cached

    def plan(self, profile: Profile) -> Workspace:
        s = self.spec
        return plan_workspace(
            self.architecture,
            profile,
            dtype=s.dtype,
            block_size=s.block_size,
            moe=self.design.moe,
            exchanged=self.exchanged,
            blocks=self.blocks,
            lowering=s.lowering,
        )

    def io_bytes(self, profile: Profile) -> int:
        """Step inputs and the logits; the pools are counted as the KV cache."""
        return sum(math.prod(port.resolve(profile.maximum)) * _FLOAT32 for port in self.ports)


def plan_memory(design: Design, limits: BuildLimits) -> MemoryPlan:
    """What an engine of these limits needs; of several ranks, the one with the heaviest layers."""
    part = pick_part(design, limits)
    profiles = limits.profiles()
    per_token = part.kv_bytes_per_token
    return MemoryPlan(
        weights_bytes=part.weights,
        workspaces=tuple((profile, part.plan(profile)) for profile in profiles),
        kv_bytes_per_token=per_token,
        kv_bytes_per_block=per_token * limits.block_size,
        pool_bytes=per_token * limits.block_size * limits.max_blocks,
        io_bytes=max(part.io_bytes(profile) for profile in profiles),
    )


def pick_part(design: Design, limits: BuildLimits) -> Part:
    """The part with the most weights, with the cache of the stage with the most layers: some may have one more, and
    lighter ones."""
    d, parallel = design, design.parallel
    weights = {
        rank: estimate_weights(
            d.architecture,
            dtype=d.dtype,
            max_seq_len=limits.max_seq_len,
            rules=d.rules,
            fp8=d.fp8,
            held=d.held,
            rank=rank,
        )
        for rank in parallel.ranks[:: parallel.tensor]  # the ranks of a stage hold as much
    }
    heaviest = max(weights, key=lambda rank: weights[rank])
    spec = NetworkSpec(dtype=d.dtype, max_seq_len=limits.max_seq_len, block_size=limits.block_size, lowering=d.lowering)
    shrunk = shrink(d.architecture, heaviest)
    ports = (*network_inputs(shrunk, spec), network_outputs(shrunk, spec)[0])
    return Part(
        design=d,
        architecture=shrunk,
        spec=spec,
        weights=weights[heaviest],
        cached=-(-d.architecture.num_layers // parallel.pipeline),
        exchanged=count_exchanged(d.architecture, parallel),
        blocks=list_block_roles(d.architecture, d.rules, fp8=d.fp8, held=d.held),
        # Pools are the ports of rank 4; everything else is int32 or float32.
        ports=tuple(port for port in ports if len(port.axes) < 4),
    )
