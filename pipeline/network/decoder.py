"""The decoder: embedding, layers, head, or any range of its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.network import inputs
from pipeline.network.attention import grouped_query_attention
from pipeline.network.cache import attention_mask
from pipeline.network.context import Context
from pipeline.network.graph import Graph, Tensor
from pipeline.network.latent_attention import latent_attention
from pipeline.network.lowering import ATTENTION, ROPE, attention_plugins, network_plugins, routed_plugins
from pipeline.network.mlp import gated_mlp
from pipeline.network.norm import rms_norm
from pipeline.network.rope import rope_table
from pipeline.network.routed_mlp import routed_mlp
from pipeline.network.vocabulary import embed, logits
from pipeline.sharding.sizes import Sizes, local_sizes

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.network.spec import NetworkSpec
    from pipeline.network.weights import Weights

Attention = Callable[[Graph, Context, int, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The parts that differ between architectures. rows_per_query: of the attention, for the mask."""

    attention: Attention
    rows_per_query: Callable[[Sizes], int]


GROUPED_QUERY = Blocks(attention=grouped_query_attention, rows_per_query=lambda _: 1)
LATENT = Blocks(attention=latent_attention, rows_per_query=lambda sizes: sizes.heads)
# HF class -> its blocks; tests hold it against checkpoint.architecture.ARCHITECTURES.
BLOCKS: dict[str, Blocks] = {
    "LlamaForCausalLM": GROUPED_QUERY,
    "Qwen2ForCausalLM": GROUPED_QUERY,
    "DeepseekForCausalLM": GROUPED_QUERY,
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
}


def write_decoder(g: Graph, architecture: Architecture, spec: NetworkSpec, weights: Weights) -> None:
    """Fills the graph's network: inputs and outputs as `inputs` declares them for this architecture and slice."""
    first, last = spec.layer_range(architecture)
    g.announce(network_plugins(architecture, spec, weights))
    step = {port.name: g.input(port) for port in inputs.network_inputs(architecture, spec)}
    blocks = BLOCKS[architecture.name]
    plugins = attention_plugins(architecture, spec) | routed_plugins(architecture, spec)
    positions = None if ROPE in plugins else g.reshape("rope.positions", step[inputs.POSITION_IDS.name], (-1, 1))
    sizes = local_sizes(architecture, spec.rank)
    rows_per_query = blocks.rows_per_query(sizes)
    mask = None if ATTENTION in plugins else attention_mask(g.at("mask"), step, spec.block_size, rows_per_query)
    context = Context(
        architecture=architecture,
        spec=spec,
        sizes=sizes,
        weights=weights,
        inputs=step,
        positions=positions,
        tables=_tables(g.at("rope"), architecture, spec),
        mask=mask,
        plugins=plugins,
    )
    x = step[inputs.HIDDEN_STATES] if first else embed(g, context)
    for layer in range(first, last):
        x = _layer(g.at(f"layers.{layer}"), context, blocks, layer, x)
    if last < architecture.num_layers:
        g.output(inputs.HIDDEN_STATES_OUT, g.identity(inputs.HIDDEN_STATES_OUT, x))
        return
    x = g.gather("wanted_rows", x, step[inputs.LOGIT_ROWS.name])
    x = rms_norm(g, weights, "ln_f", x, architecture.hidden_size, architecture.norm_eps)
    g.output(inputs.LOGITS, logits(g, context, x))


def _layer(g: Graph, context: Context, blocks: Blocks, layer: int, x: Tensor) -> Tensor:
    a, weights = context.architecture, context.weights
    normal = rms_norm(g, weights, "input_layernorm", x, a.hidden_size, a.norm_eps)
    x = g.sum("attention_residual", x, blocks.attention(g.at("attention"), context, layer, normal))
    normal = rms_norm(g, weights, "post_layernorm", x, a.hidden_size, a.norm_eps)
    if a.is_routed(layer):
        y = routed_mlp(g.at("mlp"), context, normal)
    else:
        y = gated_mlp(g.at("mlp"), context, normal, context.sizes.columns)
    return g.sum("output", x, y)


def _tables(g: Graph, architecture: Architecture, spec: NetworkSpec) -> tuple[Tensor, Tensor]:
    dim = architecture.latent.qk_rope_head_dim if architecture.latent else architecture.head_dim
    cos, sin = rope_table(
        architecture.rope,
        dim,
        spec.max_seq_len,
        max_position_embeddings=architecture.max_position_embeddings,
    )
    return g.number("cos", cos, "float32"), g.number("sin", sin, "float32")
