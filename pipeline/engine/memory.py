"""What an engine will need of the GPU's memory, before anything is converted: for `plan` and the config's checks.

Weights from the layout (which tensors there are) and the quantization rules, workspace from kernels.py, the KV cache
from the architecture. Pure Python, by kinds of layers: DeepSeek-V3's 90,000 tensors cost no more than a small model's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts import list_kinds
from pipeline.checkpoint.layouts.scales import BLOCK, count_blocks
from pipeline.engine.kernels import DTYPE_BYTES, plan_workspace
from pipeline.engine.limits import BuildLimits, Profile, Rectangle
from pipeline.engine.workspace import Workspace
from pipeline.network.inputs import network_inputs, network_outputs
from pipeline.network.spec import NetworkSpec

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.layouts import Kind

# What the CUDA context, the kernels' code and TensorRT's own objects take beside what is planned here. Not measured: no
# GPU has run these engines yet; CUDA contexts of this size are usual.
RESERVE_BYTES = 1 << 30
GROUP_SIZES = (128, 64, 32)
_FLOAT32 = 4
# Roles of the linears that DeepSeek ships in FP8 blocks.
FP8_ROLES = ("experts", "shared_experts", "mlp", "attention_output", "attention_input", "attention_latent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Rules:
    """Which linears become INT4: roles to include, shell patterns of engine names to leave out, the group wanted."""

    include: Sequence[str]
    exclude: Sequence[str] = ()
    group_size: int = 128

    def pick_group(self, role: str, shape: tuple[int, ...]) -> int | None:
        """The group of a linear [out, in], None where it stays 16-bit."""
        if role not in self.include or len(shape) != 2 or shape[0] % 2:
            return None
        return next((size for size in GROUP_SIZES if size <= self.group_size and shape[1] % size == 0), None)


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
    int4: Int4Rules | None = None,
    fp8: bool = False,
    moe: str = "dense",
) -> MemoryPlan:
    """What an engine of these limits needs. dtype: of 16/32-bit weights, activations and the KV cache. fp8: linears
    stay in the source's FP8 blocks."""
    spec = NetworkSpec(dtype=dtype, max_seq_len=limits.max_seq_len, block_size=limits.block_size, moe=moe)
    profiles = limits.profiles()
    per_token = _kv_bytes_per_token(architecture, dtype)
    return MemoryPlan(
        weights_bytes=estimate_weights(architecture, dtype=dtype, max_seq_len=limits.max_seq_len, int4=int4, fp8=fp8),
        workspaces=tuple((profile, _plan(architecture, profile, spec)) for profile in profiles),
        kv_bytes_per_token=per_token,
        kv_bytes_per_block=per_token * limits.block_size,
        pool_bytes=per_token * limits.block_size * limits.max_blocks,
        io_bytes=max(_io_bytes(architecture, spec, profile) for profile in profiles),
    )


def fit_batches(
    architecture: Architecture,
    *,
    gpu_bytes: int,
    dtype: str,
    limits: BuildLimits,
    int4: Int4Rules | None = None,
    fp8: bool = False,
    moe: str = "dense",
) -> tuple[Fit, ...]:
    """The largest batch for each length from 1K doubling up to max_seq_len, if the engine were built for just that.

    Keeps the limits' rows per context step; a context step holds no more sequences than the limits allow it.
    """
    fits = []
    weights = estimate_weights(architecture, dtype=dtype, max_seq_len=limits.max_seq_len, int4=int4, fp8=fp8)
    for length in _lengths(limits.max_seq_len):
        needs = _Needs(architecture=architecture, dtype=dtype, limits=limits, moe=moe, weights=weights, length=length)
        fits.append(Fit(length=length, batch=_find_largest(needs.nbytes, gpu_bytes)))
    return tuple(fits)


def estimate_weights(
    architecture: Architecture, *, dtype: str, max_seq_len: int, int4: Int4Rules | None = None, fp8: bool = False
) -> int:
    """Bytes of weights that the engine file will state, RoPE's tables among them."""
    e = DTYPE_BYTES[dtype]
    total = 0
    for kind in list_kinds(architecture):
        mapping = kind.first
        if mapping.optional:
            continue
        if fp8 and mapping.role in FP8_ROLES and len(mapping.target_shape) == 2:
            blocks = math.prod(count_blocks(mapping.target_shape))
            total += kind.count * blocks * (BLOCK * BLOCK + _FLOAT32)  # the last ones are filled up
            continue
        elements, quantized = math.prod(mapping.target_shape), 0
        group = int4.pick_group(mapping.role, mapping.target_shape) if int4 else None
        if int4 and group:
            quantized = kind.count - _count_excluded(kind, int4.exclude)
            total += quantized * (elements // 2 + elements // group * e)
        # Routers run in float32, and their constants are widened when the engine is built.
        total += (kind.count - quantized) * elements * (_FLOAT32 if mapping.role == "router" else e)
    rotary = architecture.latent.qk_rope_head_dim if architecture.latent else architecture.head_dim
    return total + max_seq_len * rotary * _FLOAT32


def _plan(architecture: Architecture, profile: Profile, spec: NetworkSpec) -> Workspace:
    return plan_workspace(architecture, profile, dtype=spec.dtype, block_size=spec.block_size, moe=spec.moe)


@dataclass(slots=True, kw_only=True)
class _Needs:
    """Bytes for an engine of one rectangle, as a function of its batch."""

    architecture: Architecture
    dtype: str
    limits: BuildLimits
    moe: str
    weights: int
    length: int
    contexts: dict[int, int] = field(default_factory=dict)  # sequences of a context step -> its workspace

    def nbytes(self, batch: int) -> int:
        limits = replace(
            self.limits,
            max_seq_len=self.length,
            max_batch_size=batch,
            generation=(Rectangle(batch=batch, length=self.length),),
            max_blocks=batch * -(-self.length // self.limits.block_size) + 1,
        )
        a, size = self.architecture, limits.block_size
        spec = NetworkSpec(dtype=self.dtype, max_seq_len=self.length, block_size=size, moe=self.moe)
        context, generation = limits.profiles()
        sequences = min(batch, self.limits.context_batch)
        if sequences not in self.contexts:
            context = replace(context, maximum={**context.maximum, "B": sequences, "N": sequences})
            self.contexts[sequences] = _plan(a, context, spec).nbytes
        workspace = max(_plan(a, generation, spec).nbytes, self.contexts[sequences])
        pool = limits.max_blocks * size * _kv_bytes_per_token(a, self.dtype)
        return self.weights + workspace + pool + _io_bytes(a, spec, generation) + RESERVE_BYTES


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


def _kv_bytes_per_token(architecture: Architecture, dtype: str) -> int:
    per_layer = sum(heads * width for heads, width in architecture.cache_widths)
    return per_layer * DTYPE_BYTES[dtype] * architecture.num_layers


def _io_bytes(architecture: Architecture, spec: NetworkSpec, profile: Profile) -> int:
    """Step inputs and the logits; the pools are counted as the KV cache."""
    ports = (*network_inputs(architecture, spec), network_outputs(architecture, spec)[0])
    # Pools are the ports of rank 4; everything else is int32 or float32.
    return sum(math.prod(port.resolve(profile.maximum)) * _FLOAT32 for port in ports if len(port.axes) < 4)


def _lengths(longest: int) -> list[int]:
    lengths = []
    length = 1024
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]


def _count_excluded(kind: Kind, patterns: Sequence[str]) -> int:
    """How many of the tensors of a kind a pattern names, with or without `.weight`."""
    if not patterns:
        return 0
    # One expression for all patterns: DeepSeek-V3 has 45,000 expert linears to hold against them.
    excludes = re.compile("|".join(map(translate, patterns))).match
    return sum(1 for name in kind.names() if excludes(name.removesuffix(".weight")) or excludes(name))
