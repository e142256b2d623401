"""The training-only term that keeps a router's experts in use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from checkpoints.models import Recipe


def balance_loss(router_logits: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """Return the expert-level balance loss, a scalar of about 1 per routed layer when the load is even.

    DeepSeek-V2 (arXiv:2405.04434), equation 23: sum over experts of (share of tokens) x (mean affinity), here over
    the batch and without the group limit, which a balanced softmax hardly meets. ``router_logits``: one ``[tokens,
    experts]`` per routed layer.
    """
    top_k = int(str(recipe.config["num_experts_per_tok"]))
    losses = []
    for logits in router_logits:
        scores = logits.float().softmax(dim=-1)
        experts = scores.shape[-1]
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(top_k, dim=-1).indices, 1.0)
        losses.append(experts / top_k * (chosen.mean(dim=0) * scores.mean(dim=0)).sum())
    return torch.stack(losses).sum()
