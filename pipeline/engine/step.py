"""A step of a decoder as a schedule of kernels: what those of attention and of the MLPs share."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.checkpoint.architecture import Architecture
from pipeline.engine.workspace import Buffer, Schedule
from pipeline.network.spec import Lowering

# Kernels that do not need each other run on streams of their own where they are work enough: experts of this many
# multiply-adds beside the router, a gather of this many elements beside the queries' GEMM (of any size, once a layer
# before it has used a second stream).
FORKED_EXPERTS = 1 << 23
FORKED_GATHER = 1 << 24
# Shared experts beside a plugin with the routed ones, a stream of their own: seen at 2**29, and not at 2**24.
FORKED_SHARED = 1 << 25
FLOAT32 = INT32 = 4

Buffers = tuple[Buffer, ...]


@dataclass(slots=True)
class Step:
    """blocks: roles of the linears in FP8 blocks. attention_scratch: what the plugin paged_attention asks for, where it
    is one."""

    a: Architecture
    n: dict[str, int]
    e: int
    moe: str
    exchanged: int = 1
    blocks: frozenset[str] = frozenset()
    lowering: Lowering = field(default_factory=Lowering)
    attention_scratch: int = 0
    plan: Schedule = field(default_factory=Schedule)
    # Made by the first layer, read by all: the mask, RoPE's rows of the tables.
    shared: Buffers = ()
    has_streams: bool = False  # an earlier layer has used a second stream
    has_side_scratch: bool = False  # … for GEMMs beside the plugin moe_experts

    @property
    def hidden(self) -> int:
        return self.n["T"] * self.a.hidden_size * self.e

    @property
    def rotates(self) -> bool:
        """Whether RoPE and the cache's update are TensorRT's own."""
        return self.lowering.rope_paged_kv == "native"

    @property
    def attends(self) -> bool:
        """Whether attention is TensorRT's own."""
        return self.lowering.paged_attention == "native"

    @property
    def is_generation(self) -> bool:
        return self.n["Q"] == 1

    def dequantize(self, role: str, elements: int) -> Buffers:
        """The weights of a GEMM of so many elements, where they have to be made for it."""
        return self.plan.kernel(weights=elements * self.e) if role in self.blocks else ()

    def linear(self, role: str, *reads: Buffer, out: int, width: int, **writes: int) -> Buffers:
        """A GEMM whose weights are [out, width]."""
        return self.plan.gemm(*reads, *self.dequantize(role, out * width), **writes)


def add_norm(s: Step, *reads: Buffer) -> Buffers:
    return s.plan.kernel(*reads, residual=s.hidden, normal=s.hidden)
