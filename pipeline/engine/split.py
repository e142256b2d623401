"""One model over several GPUs, as sizes: what each of them holds. For `plan`.

By the convention of pipeline/sharding: *tensor* splits heads, columns and the vocabulary, while what every head reads
(MLA's latent, the norms, the router) is held by each; *pipeline* gives each GPU a range of layers; *expert* gives the
GPUs of a tensor group whole experts, whose columns tensor / expert of them share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.sharding.ranks import Parallel, Rank, layers

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
    "vocab_embedding",
)
EMBEDDING = "transformer.vocab_embedding."


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Sizes that divide what they split (config/parallel_rules.py)."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def columns(self) -> int:
        """Among how many GPUs an expert's columns are divided."""
        return self.tensor // self.expert

    def exchanged(self, architecture: Architecture) -> int:
        """How many times a step's rows the experts of one GPU are sent at most: once for each expert that a token may
        have there."""
        experts = architecture.experts
        return 1 if self.expert == 1 or experts is None else min(experts.top_k, experts.num_routed // self.expert)

    def stages(self, architecture: Architecture) -> list[range]:
        """The decoder layers of each pipeline stage."""
        stages = Parallel(pipeline=self.pipeline)
        return [range(*layers(architecture, Rank(stages, stage))) for stage in range(self.pipeline)]

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
        if kind.first.expert is not None:
            return self.columns
        return self.tensor if base.endswith(TENSOR_SPLIT) else 1

    def shrink(self, architecture: Architecture, layers: range) -> Architecture:
        """What one GPU computes, as a model of its own. The columns of its shared experts follow from the routed ones',
        and are counted `expert` times too many."""
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
                intermediate_size=experts.intermediate_size // self.columns,
                first_dense_layers=min(max(0, experts.first_dense_layers - layers.start), len(layers)),
            ),
        )


WHOLE = Split()
