"""One model over several GPUs, as sizes: what each of them holds. For `plan`; engines over several GPUs are not built.

The GPUs form a grid of tensor x pipeline x expert. *Tensor* splits heads, MLP columns and experts' columns; what every
head reads (MLA's latent, the norms, the router, the embedding) is held by each. *Pipeline* gives each GPU a range of
layers. *Expert* gives each GPU whole experts and, apart from them, the whole rest of the layer, for sequences of its
own: data parallel attention, as DeepSeek serves V3 (arXiv 2412.19437 §3.4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.layouts import Kind

# Linears that tensor parallelism splits, by the end of their names; all others are held whole.
TENSOR_SPLIT = (
    "attention.qkv",
    "attention.q_proj",
    "attention.q_b_proj",
    "attention.kv_b_proj",
    "attention.dense",
    "mlp.fc",
    "mlp.gate",
    "mlp.proj",
    "shared_expert.fc",
    "shared_expert.gate",
    "shared_expert.proj",
    "lm_head",
)
EMBEDDING = "transformer.vocab_embedding."


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Sizes that divide what they split (config/rules.py)."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.expert

    def stages(self, architecture: Architecture) -> list[range]:
        """The decoder layers of each pipeline stage."""
        size = architecture.num_layers // self.pipeline
        return [range(first, first + size) for first in range(0, size * self.pipeline, size)]

    def count(self, kind: Kind, architecture: Architecture, layers: range) -> int:
        """How many tensors of a kind a GPU with these layers holds."""
        if kind.first.layer is not None:
            share = self.expert if kind.first.expert is not None else 1
            return sum(1 for layer in kind.layers if layer in layers) * kind.experts // share
        is_first = kind.first.target.startswith(EMBEDDING)
        at = 0 if is_first and not architecture.tie_word_embeddings else architecture.num_layers - 1
        return kind.count if at in layers or (is_first and 0 in layers) else 0

    def share(self, kind: Kind) -> int:
        """Among how many GPUs the elements of each such tensor are divided."""
        base = kind.first.target.removesuffix(".weight").removesuffix(".bias")
        split = base.endswith(TENSOR_SPLIT) or kind.first.expert is not None
        return self.tensor if split else 1

    def shrink(self, architecture: Architecture, layers: range) -> Architecture:
        """What one GPU computes, as a model of its own."""
        experts = architecture.experts
        return replace(
            architecture,
            num_heads=architecture.num_heads // self.tensor,
            num_kv_heads=max(1, architecture.num_kv_heads // self.tensor),
            intermediate_size=architecture.intermediate_size // self.tensor,
            num_layers=len(layers),
            experts=experts
            and replace(
                experts,
                num_routed=experts.num_routed // self.expert,
                intermediate_size=experts.intermediate_size // self.tensor,
                first_dense_layers=min(max(0, experts.first_dense_layers - layers.start), len(layers)),
            ),
        )


WHOLE = Split()
