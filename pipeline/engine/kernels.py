"""What kernels TensorRT-RTX 1.7 makes of a decoder, as far as they need memory, from the architecture alone.

Read off compiled engines, and held against them in tests. A change of pipeline/network that moves a workspace by more
than a tenth shows there. rope_paged_kv, which updates its inputs, parts a graph in two: these take turns in one memory,
and the tensors between them have memory of their own.

Sizes: T rows, B sequences, Q rows of the longest, K cache rows of the longest, N rows of logits (all of the profile's
largest); h, kv, d heads, KV heads, head size; R, P, D = R + P widths of the latent; e bytes of the model's type.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.checkpoint.architecture import Architecture
from pipeline.checkpoint.tensors import MODEL_DTYPE_BYTES
from pipeline.engine.attention_kernels import grouped_attention, latent_attention
from pipeline.engine.limits import Profile
from pipeline.engine.mlp_kernels import MLPS, dense_mlp
from pipeline.engine.myelin import GRANULE
from pipeline.engine.step import INT32, Step
from pipeline.engine.workspace import SIDE_SCRATCH, Schedule, Workspace, align, place
from pipeline.network.lowering import ATTENTION, attention_plugins
from pipeline.network.spec import Lowering, NetworkSpec

# Added to the sum: the compiler's own order of kernels is not known, and engines were seen to take up to 1.8 % more.
MARGIN = 0.02
# Layers of a kind that are worth listing: a third one fits into the regions of the two before it.
_LAYERS_THAT_COUNT = 2


def plan_workspace(
    architecture: Architecture,
    profile: Profile,
    *,
    dtype: str,
    block_size: int,
    moe: str,
    exchanged: int = 1,
    blocks: frozenset[str] = frozenset(),
    lowering: Lowering = Lowering(),
) -> Workspace:
    """The workspace that an engine will state for this profile, and what it is made of. exchanged: how many GPUs send
    their rows to the routed experts here, each at worst all of them. blocks: roles of the linears in FP8 blocks, each
    of which is dequantized into the workspace before its GEMM."""
    sizes = {**profile.maximum, "K": profile.maximum["MB"] * block_size}
    spec = NetworkSpec(dtype=dtype, max_seq_len=sizes["K"], block_size=block_size, lowering=lowering)
    attention = attention_plugins(architecture, spec).get(ATTENTION)
    step = Step(
        a=architecture,
        n=sizes,
        e=MODEL_DTYPE_BYTES[dtype],
        moe="plugin" if lowering.moe_experts == "plugin" else moe,
        exchanged=exchanged,
        blocks=blocks,
        lowering=lowering,
        attention_scratch=attention.scratch_bytes(()) if attention else 0,
    )
    layers = range(architecture.num_layers)
    kinds = [[layer for layer in layers if architecture.is_routed(layer) is routed] for routed in (False, True)]
    chosen = sorted(layer for kind in kinds for layer in kind[:_LAYERS_THAT_COUNT])
    graphs = []
    for written in [chosen] if step.rotates else [[layer] for layer in chosen]:
        graph = replace(step, plan=Schedule(single=bool(blocks)))
        _write_decoder(graph, written)
        graphs.append(graph)
    placed = max((place(graph.plan.buffers) for graph in graphs), key=lambda workspace: workspace.nbytes)
    beside = _list_between(step)
    if not step.attends and any(graph.has_side_scratch for graph in graphs):
        beside |= {f"side_scratch_{i}": SIDE_SCRATCH for i in range(2)}
    terms = placed.terms + tuple(beside.items())
    nbytes = int(sum(nbytes for _, nbytes in terms) * (1 + MARGIN))
    return Workspace(nbytes=align(nbytes, GRANULE), terms=tuple(sorted(terms, key=lambda term: -term[1])))


def _list_between(s: Step) -> dict[str, int]:
    """What lies between the graphs that rope_paged_kv parts: its inputs and outputs, the residual before and after a
    layer, and the mask where attention is TensorRT's."""
    if s.rotates:
        return {}
    a, t, e = s.a, s.n["T"], s.e
    found = {f"residual_{i}": s.hidden for i in range(2)}
    if s.attends:
        found["mask"] = s.n["B"] * s.n["Q"] * (a.num_heads if a.latent else 1) * s.n["K"]
    if a.latent is None:
        query, width = a.num_heads * a.head_dim, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        return found | {"qkv": t * width * e, "query": t * query * e}
    latent, h = a.latent, a.num_heads
    widths = {
        "query_projection": h * latent.qk_head_dim,
        "absorbed": h * latent.kv_lora_rank,
        "content": latent.kv_lora_rank,
        "compressed": latent.latent_dim,
        "query": h * latent.latent_dim,
    }
    return found | {name: t * width * e for name, width in widths.items()}


def _write_decoder(s: Step, layers: list[int]) -> None:
    # Which rows go to which block: a few integers per block and per row, read by every layer's cache update.
    blocks = {f"block_rows_{i}": s.n["NB"] * INT32 for i in range(2)}
    rows = {f"row_blocks_{i}": s.n["T"] * INT32 for i in range(4)}
    indices = s.plan.kernel(**blocks, **rows) if s.rotates else ()
    state = s.plan.kernel(residual=s.hidden, normal=s.hidden)
    for layer in layers:
        state = (latent_attention if s.a.latent else grouped_attention)(s, *state)
        mlp = MLPS[s.moe] if s.a.is_routed(layer) else dense_mlp
        state = mlp(s, *state)
    (wanted,) = s.plan.kernel(*state, *indices, wanted=s.n["N"] * s.a.hidden_size * s.e)
    s.plan.gemm(wanted)
