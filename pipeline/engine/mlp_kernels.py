"""The kernels of a decoder's MLPs, dense and routed; sizes are spelled as in kernels.py."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.checkpoint.architecture import Experts
from pipeline.engine.step import FLOAT32, FORKED_EXPERTS, FORKED_SHARED, INT32, Buffers, Step, add_norm
from pipeline.engine.workspace import Buffer
from plugins.moe_experts.operation import lay_out

EXPERTS, SHARED = "experts", "shared_experts"  # roles


def dense_mlp(s: Step, residual: Buffer, normal: Buffer) -> Buffers:
    return add_norm(s, residual, _gated_mlp(s, "mlp", normal, s.a.intermediate_size))


def _gated_mlp(s: Step, role: str, normal: Buffer, width: int) -> Buffer:
    hidden = s.a.hidden_size
    gated = _gate(s, role, "", normal, matrix=hidden * width, rows=s.n["T"] * width * s.e)
    (down,) = s.linear(role, gated, out=hidden, width=width, down=s.hidden)
    return down


def _gate(s: Step, role: str, prefix: str, normal: Buffer, *, matrix: int, rows: int) -> Buffer:
    """Gate and up: one GEMM, but of two weights that are dequantized one after the other. matrix: elements of each."""
    if role in s.blocks:
        (gate,) = s.plan.gemm(normal, *s.dequantize(role, matrix), **{f"{prefix}gate": rows})
        (gated,) = s.plan.gemm(normal, gate, *s.dequantize(role, matrix), **{f"{prefix}gated": rows})
    else:
        (both,) = s.plan.gemm(normal, **{f"{prefix}gate_and_up": 2 * rows})
        (gated,) = s.plan.kernel(both, **{f"{prefix}gated": rows})
    return gated


def _routed_dense(s: Step, residual: Buffer, normal: Buffer) -> Buffers:
    """Every expert on every row, E x T of them; the router beside them on a stream of its own where that is work."""
    experts = _experts(s)
    t, width, count = s.n["T"] * s.exchanged, experts.intermediate_size, experts.num_routed
    wide, narrow = t * s.a.hidden_size * FLOAT32, t * s.a.hidden_size * s.e
    router_input, experts_input = s.plan.kernel(normal, router_input_float32=wide, experts_input=narrow)
    if count * t * s.a.hidden_size * 2 * width >= FORKED_EXPERTS:
        s.plan.fork()
        s.has_streams = True
    (one_hot,) = s.plan.gemm(router_input, one_hot=t * experts.top_k * count * FLOAT32)
    s.plan.next_stream()
    matrix = count * s.a.hidden_size * width
    gated = _gate(s, EXPERTS, "experts_", experts_input, matrix=matrix, rows=count * t * width * s.e)
    (down,) = s.plan.gemm(gated, *s.dequantize(EXPERTS, matrix), experts_down=count * narrow)
    shared: Buffers = ()
    if experts.scoring_func == "sigmoid" and t * s.a.hidden_size * 2 * width * experts.num_shared >= FORKED_EXPERTS:
        s.plan.next_stream()  # a long router, beside which there is time for it
        shared = (_gated_mlp(s, SHARED, normal, width * experts.num_shared),)
    s.plan.join()
    (total,) = s.plan.kernel(down, one_hot, experts_sum_float32=wide)
    if experts.num_shared and not shared:
        shared = (_gated_mlp(s, SHARED, normal, width * experts.num_shared),)
    return add_norm(s, residual, total, *shared)


def _routed_gather(s: Step, residual: Buffer, normal: Buffer) -> Buffers:
    """Every row's own experts, their weights unpacked and copied: k x T matrices of each linear, on three streams."""
    experts = _experts(s)
    pairs, width, e = s.n["T"] * s.exchanged * experts.top_k, experts.intermediate_size, s.e
    router_input, rows = s.plan.kernel(
        normal, router_input_float32=s.hidden // e * FLOAT32, experts_input=experts.top_k * s.hidden
    )
    (chosen,) = s.plan.gemm(router_input, chosen=pairs * INT32)
    matrix = pairs * s.a.hidden_size * width * e
    stack = experts.num_routed * s.a.hidden_size * width
    s.plan.fork()
    (weights,) = s.plan.kernel(chosen, *s.dequantize(EXPERTS, stack), gathered_fc=matrix)
    (gate,) = s.plan.gemm(rows, weights, experts_gate=pairs * width * e)
    s.plan.next_stream()
    (weights,) = s.plan.kernel(chosen, *s.dequantize(EXPERTS, stack), gathered_gate=matrix)
    (up,) = s.plan.gemm(rows, weights, experts_up=pairs * width * e)
    s.plan.next_stream()
    (weights,) = s.plan.kernel(chosen, *s.dequantize(EXPERTS, stack), gathered_proj=matrix)
    shared = (_gated_mlp(s, SHARED, normal, width * experts.num_shared),) if experts.num_shared else ()
    s.plan.join()
    (gated,) = s.plan.kernel(gate, up, experts_gated=pairs * width * e)
    (down,) = s.plan.gemm(gated, weights, experts_down=experts.top_k * s.hidden)
    return add_norm(s, residual, down, *shared)


def _routed_plugin(s: Step, residual: Buffer, normal: Buffer) -> Buffers:
    """One operation, whose own workspace has a row of each width for every pair of a row and an expert."""
    experts = _experts(s)
    pairs, width, hidden = s.n["T"] * experts.top_k, experts.intermediate_size, s.a.hidden_size
    wide = s.n["T"] * hidden * FLOAT32
    router_input, experts_input = s.plan.kernel(normal, router_input_float32=wide, experts_input=s.hidden)
    if s.n["T"] * hidden * 2 * width * experts.num_shared >= FORKED_SHARED:
        s.plan.fork()
        s.has_streams = s.has_side_scratch = True
    shared = (_gated_mlp(s, SHARED, normal, width * experts.num_shared),) if experts.num_shared else ()
    s.plan.next_stream()
    (chosen,) = s.plan.gemm(router_input, chosen=pairs * INT32)
    workspace = lay_out(experts.num_routed, pairs, width * s.e, hidden * s.e)[-1]
    total, _ = s.plan.kernel(experts_input, chosen, experts_sum_float32=wide, experts_workspace=workspace)
    s.plan.join()
    return add_norm(s, residual, total, *shared)


def _experts(s: Step) -> Experts:
    if s.a.experts is None:
        raise TypeError(f"{s.a.name} has no routed experts")
    return s.a.experts


MLPS: dict[str, Callable[[Step, Buffer, Buffer], Buffers]] = {
    "dense": _routed_dense,
    "gather": _routed_gather,
    "plugin": _routed_plugin,
}
