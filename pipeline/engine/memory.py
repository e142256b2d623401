"""What an engine will need of the GPU's memory, before anything is converted: for `plan` and the config's checks.

Weights from weights.py, workspace from kernels.py, the KV cache from the architecture. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.checkpoint.tensors import MODEL_DTYPE_BYTES
from pipeline.engine.kernels import plan_workspace
from pipeline.engine.limits import BuildLimits, Profile, Rectangle
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
__all__ = ["RESERVE_BYTES", "Fit", "MemoryPlan", "estimate_weights", "fit_batches", "plan_memory"]


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
class Fit:
    """The most sequences of `length` tokens that fit the GPU at once; 0: not even one."""

    length: int
    batch: int


def plan_memory(
    architecture: Architecture,
    *,
    dtype: str,
    limits: BuildLimits,
    rules: Rules = NOTHING,
    fp8: bool = False,
    held: HeldKinds = NOTHING_HELD,
    moe: str = "dense",
    lowering: Lowering = Lowering(),
    kv_cache: str = "model",
    parallel: Parallel = Parallel(),
) -> MemoryPlan:
    """What an engine of these limits needs; of several ranks, the one with the heaviest layers. dtype: of 16/32-bit
    weights and activations, and of the KV cache if kv_cache is "model"; else that is "fp8" or "int8". fp8: linears stay
    in the source's FP8 blocks. held: as another tool quantized them. moe: "dense" or "gather", where moe_experts is
    native."""
    part = _pick_part(
        architecture,
        dtype,
        limits,
        rules,
        fp8=fp8,
        held=held,
        moe=moe,
        lowering=lowering,
        kv_cache=kv_cache,
        parallel=parallel,
    )
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


def fit_batches(
    architecture: Architecture,
    *,
    gpu_bytes: int,
    dtype: str,
    limits: BuildLimits,
    rules: Rules = NOTHING,
    fp8: bool = False,
    held: HeldKinds = NOTHING_HELD,
    moe: str = "dense",
    lowering: Lowering = Lowering(),
    kv_cache: str = "model",
    parallel: Parallel = Parallel(),
) -> tuple[Fit, ...]:
    """The largest batch for each length from 1K doubling up to max_seq_len, if the engine were built for just that.

    Keeps the limits' rows per context step; a context step holds no more sequences than the limits allow it.
    """
    part = _pick_part(
        architecture,
        dtype,
        limits,
        rules,
        fp8=fp8,
        held=held,
        moe=moe,
        lowering=lowering,
        kv_cache=kv_cache,
        parallel=parallel,
    )
    return tuple(
        Fit(length=length, batch=_find_largest(_Needs(part=part, limits=limits, length=length).nbytes, gpu_bytes))
        for length in _lengths(limits.max_seq_len)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One GPU's part of the model: what it computes, as a model of its own, and its bytes of weights. `cached`: the
    layers whose cache is counted; `exchanged`: how many GPUs' rows its experts see."""

    architecture: Architecture
    spec: NetworkSpec
    moe: str
    kv_cache: str
    weights: int
    cached: int
    exchanged: int
    blocks: frozenset[str]
    ports: tuple[Port, ...]  # step inputs and the logits, without the pools

    @property
    def kv_bytes_per_token(self) -> int:
        per_layer = sum(heads * width for heads, width in self.architecture.cache_widths)
        width = MODEL_DTYPE_BYTES[self.spec.dtype] if self.kv_cache == "model" else 1
        return per_layer * width * self.cached

    def plan(self, profile: Profile) -> Workspace:
        s = self.spec
        return plan_workspace(
            self.architecture,
            profile,
            dtype=s.dtype,
            block_size=s.block_size,
            moe=self.moe,
            exchanged=self.exchanged,
            blocks=self.blocks,
            lowering=s.lowering,
        )

    def io_bytes(self, profile: Profile) -> int:
        """Step inputs and the logits; the pools are counted as the KV cache."""
        return sum(math.prod(port.resolve(profile.maximum)) * _FLOAT32 for port in self.ports)


def _pick_part(
    architecture: Architecture,
    dtype: str,
    limits: BuildLimits,
    rules: Rules,
    *,
    fp8: bool,
    held: HeldKinds,
    moe: str,
    lowering: Lowering,
    kv_cache: str,
    parallel: Parallel,
) -> _Part:
    """The part with the most weights, with the cache of the stage with the most layers: some may have one more, and
    lighter ones."""
    weights = {
        rank: estimate_weights(
            architecture, dtype=dtype, max_seq_len=limits.max_seq_len, rules=rules, fp8=fp8, held=held, rank=rank
        )
        for rank in parallel.ranks[:: parallel.tensor]  # the ranks of a stage hold as much
    }
    heaviest = max(weights, key=lambda rank: weights[rank])
    spec = NetworkSpec(dtype=dtype, max_seq_len=limits.max_seq_len, block_size=limits.block_size, lowering=lowering)
    shrunk = shrink(architecture, heaviest)
    ports = (*network_inputs(shrunk, spec), network_outputs(shrunk, spec)[0])
    return _Part(
        architecture=shrunk,
        spec=spec,
        moe=moe,
        kv_cache=kv_cache,
        weights=weights[heaviest],
        cached=-(-architecture.num_layers // parallel.pipeline),
        exchanged=count_exchanged(architecture, parallel),
        blocks=list_block_roles(architecture, rules, fp8=fp8, held=held),
        # Pools are the ports of rank 4; everything else is int32 or float32.
        ports=tuple(port for port in ports if len(port.axes) < 4),
    )


@dataclass(slots=True, kw_only=True)
class _Needs:
    """Bytes for an engine of one rectangle, as a function of its batch."""

    part: _Part
    limits: BuildLimits
    length: int
    # sequences and rows of a context step -> its workspace
    contexts: dict[tuple[int, int], int] = field(default_factory=dict)

    def nbytes(self, batch: int) -> int:
        limits = replace(
            self.limits,
            max_seq_len=self.length,
            max_batch_size=batch,
            max_num_tokens=max(batch, self.limits.max_num_tokens),  # a step holds a token of each
            generation=(Rectangle(batch=batch, length=self.length),),
            max_blocks=batch * -(-self.length // self.limits.block_size) + 1,
        )
        context, generation = limits.profiles()
        sequences = min(batch, self.limits.context_batch)
        key = (sequences, limits.max_num_tokens)
        if key not in self.contexts:
            context = replace(context, maximum={**context.maximum, "B": sequences, "N": sequences})
            self.contexts[key] = self.part.plan(context).nbytes
        workspace = max(self.part.plan(generation).nbytes, self.contexts[key])
        pool = limits.max_blocks * limits.block_size * self.part.kv_bytes_per_token
        return self.part.weights + workspace + pool + self.part.io_bytes(generation) + RESERVE_BYTES


def _find_largest(needs: Callable[[int], int], available: int) -> int:
    """The largest batch whose needs fit, 0 if none does. Needs grow about linearly: false position, a few steps."""
    low, low_needs, high, slope = 0, 0, 0, 0.0
    while not high or high - low > 1:
        guess = low + max(1, int((available - low_needs) / slope)) if slope else low + 1
        if high:
            guess = min(guess, high - 1)
        bytes_needed = needs(guess)
        slope = (bytes_needed - low_needs) / (guess - low) if low else 0.0
        if bytes_needed <= available:
            low, low_needs = guess, bytes_needed
        else:
            high = guess
    return low


def _lengths(longest: int) -> list[int]:
    lengths = []
    length = 1024
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]
