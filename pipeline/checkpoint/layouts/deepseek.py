"""DeepSeek-MoE, the first DeepSeek with experts (arXiv 2401.06066): Llama's attention; leading dense layers, then
shared and routed experts, as V2 and V3 have them too.

Names are in the style of TensorRT-LLM's DeepseekForCausalLM, but experts stay apart, one tensor for each of the hub's.
Examples: layer 3 of DeepSeek-MoE-16B (hidden 2048, 16 heads, 64 experts of 1408, 2 shared).
"""

from __future__ import annotations

from pipeline.checkpoint.architecture import Architecture
from pipeline.checkpoint.layouts import llama
from pipeline.checkpoint.layouts.llama import LAYERS, SOURCE_LAYERS, UNUSED
from pipeline.checkpoint.layouts.rows import DENSE, EXPERT, ROUTED, Dimension, Row, linear

__all__ = ["ROUTED_MLP", "ROWS", "UNUSED", "list_dimensions", "list_expert_dimensions"]

ROUTED_MLP: list[Row] = [
    # model.layers.3.mlp.gate.weight [64, 2048] -> transformer.layers.3.mlp.router.weight
    *linear(LAYERS + "mlp.router", [SOURCE_LAYERS + "mlp.gate"], ["experts"], "hidden", role="router", where=ROUTED),
    # model.layers.3.mlp.shared_experts.gate_proj.weight [2816, 2048]
    #   -> transformer.layers.3.mlp.shared_expert.fc.weight, and up_proj -> gate, down_proj -> proj
    *llama.mlp(
        LAYERS + "mlp.shared_expert",
        SOURCE_LAYERS + "mlp.shared_experts",
        "shared",
        role="shared_experts",
        where=ROUTED,
        bias="mlp_bias",
    ),
    # model.layers.3.mlp.experts.7.gate_proj.weight [1408, 2048]
    #   -> transformer.layers.3.mlp.experts.7.fc.weight, and up_proj -> gate, down_proj -> proj
    *llama.mlp(LAYERS + "mlp.experts.{e}", SOURCE_LAYERS + "mlp.experts.{e}", "expert", role="experts", where=EXPERT),
]
ROWS: tuple[Row, ...] = (
    *llama.EMBEDDING,
    *llama.INPUT_NORM,
    *llama.ATTENTION,
    *llama.POST_NORM,
    *llama.mlp(LAYERS + "mlp", SOURCE_LAYERS + "mlp", "intermediate", role="mlp", where=DENSE),
    *ROUTED_MLP,
    *llama.HEAD,
)


def list_dimensions(a: Architecture) -> dict[str, Dimension]:
    return llama.list_dimensions(a) | list_expert_dimensions(a)


def list_expert_dimensions(a: Architecture) -> dict[str, Dimension]:
    """None of a model of dense layers only."""
    if a.experts is None:
        return {}
    width = a.experts.intermediate_size
    return {
        "experts": Dimension(a.experts.num_routed, "n_routed_experts"),
        "expert": Dimension(width, "moe_intermediate_size"),
        "shared": Dimension(width * a.experts.num_shared, "moe_intermediate_size * n_shared_experts"),
    }
