"""What `transformers` computes in fp32, one decoder layer at a time: the other side of the network's proof.

Weights come from the engine checkpoint mapped back (INT4 dequantized), so both sides hold the same numbers; that the
checkpoint itself is the source's is the conversion proof's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.hub_weights import hf_layer_state, hf_outer_state
from pipeline.checkpoint.reference import build_hf_layer, build_hf_norm, build_hf_rotary, causal_mask

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.architecture import Architecture, Experts
    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.evaluation.schedule import TokenSequence
    from pipeline.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Per sequence of t tokens: `hidden[layer][sequence]` [t, H] after each decoder layer, `logits` [t, V], and
    `margins` [t]: how close any layer's router came to another choice (infinity without routing)."""

    hidden: list[list[torch.Tensor]]
    logits: list[torch.Tensor]
    margins: list[torch.Tensor]


def compute_reference(
    source: TensorSource,
    config: Mapping[str, Any],
    architecture: Architecture,
    sequences: Sequence[TokenSequence],
    progress: Progress,
) -> Reference:
    """Runs every sequence whole, causally masked, at its own positions. Memory: one layer and the hidden states."""
    import torch

    outer = {name: weight.float() for name, weight in hf_outer_state(source, architecture).items()}
    embedding = outer["model.embed_tokens.weight"]
    states = [embedding[torch.tensor(sequence.tokens)] for sequence in sequences]
    margins = [torch.full((len(sequence.tokens),), torch.inf) for sequence in sequences]
    hidden: list[list[torch.Tensor]] = []
    progress.start("transformers", architecture.num_layers, "layers")
    for layer in range(architecture.num_layers):
        module = build_hf_layer(config, layer, hf_layer_state(source, architecture, layer), torch.float32)
        closeness: list[torch.Tensor] = []
        if architecture.experts is not None and architecture.is_routed(layer):
            router = module.get_submodule("mlp.gate")
            router.register_forward_hook(_margin_recorder(architecture.experts, closeness))
        for i, sequence in enumerate(sequences):
            states[i] = _run_layer(module, config, states[i], sequence.positions)
            if closeness:
                margins[i] = torch.minimum(margins[i], closeness.pop())
        hidden.append(list(states))
        progress.advance(1)
    norm = build_hf_norm(config, outer["model.norm.weight"])
    head = outer.get("lm_head.weight", embedding)
    logits = [norm(state) @ head.T for state in states]
    return Reference(hidden=hidden, logits=logits, margins=margins)


def _run_layer(
    module: torch.nn.Module, config: Mapping[str, Any], state: torch.Tensor, positions: Sequence[int]
) -> torch.Tensor:
    import torch

    batch = state[None]
    # A fresh rotary module each time: `dynamic` scaling remembers the longest sequence that it has seen.
    embeddings = build_hf_rotary(config)(batch, torch.tensor([list(positions)]))
    mask = causal_mask(state.shape[0], state.dtype)
    output = module(batch, attention_mask=mask, position_embeddings=embeddings)
    result: torch.Tensor = (output[0] if isinstance(output, tuple) else output)[0]
    return result


def _margin_recorder(experts: Experts, closeness: list[torch.Tensor]) -> Any:
    """A hook on the router that appends, per token, the smallest gap in score between a chosen and a spurned one."""

    def record(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _output: object) -> None:
        x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
        scores = SCORES[experts.scoring_func](x @ module.weight.float().T)  # type: ignore[operator]
        closeness.append(router_margin(scores + getattr(module, "e_score_correction_bias", 0.0), experts))

    return record


def router_margin(scores: torch.Tensor, experts: Experts) -> torch.Tensor:
    """[T] from what experts are ranked by, scores [T, E], with the correction bias where there is one: the gap at the
    edge of the chosen groups, then of the chosen experts; the smaller one."""
    import torch

    def edge(values: torch.Tensor, k: int) -> torch.Tensor:
        if k >= values.shape[-1]:
            return torch.full(values.shape[:-1], torch.inf)
        top = values.topk(k + 1, dim=-1).values
        return top[..., k - 1] - top[..., k]

    if experts.topk_method not in GROUP_SCORES:
        return edge(scores, experts.top_k)
    groups = scores.reshape(*scores.shape[:-1], experts.n_group, -1)
    best = GROUP_SCORES[experts.topk_method](groups)
    chosen = torch.zeros_like(best).scatter(-1, best.topk(experts.topk_group, dim=-1).indices, 1.0)
    masked = groups.masked_fill(chosen[..., None] == 0, -torch.inf).flatten(-2)
    return torch.minimum(edge(best, experts.topk_group), edge(masked, experts.top_k))


# What the routers of DeepSeek-V2 (softmax; a group is as good as its best expert) and V3 (sigmoid; the sum of its best
# two) rank. The mean of two instead of the sum: as near to a tie as its experts' scores are.
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
}
GROUP_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "group_limited_greedy": lambda groups: groups.amax(-1),
    "noaux_tc": lambda groups: groups.topk(2, dim=-1).values.mean(-1),
}
