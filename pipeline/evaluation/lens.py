"""What a decoder layer's output would say if it were the last: final norm and head applied to it ("logit lens").

It gives a distance in nats for every layer, which a difference of hidden states is not. The head is read a strip of its
rows at a time, so that one of any size takes little memory. Only norms and heads as every supported architecture has
them: y = head (w * x / rms(x)), no bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.checkpoint.hub_weights import hf_outer_state

if TYPE_CHECKING:
    import torch

    from pipeline.evaluation.subject import Subject

STRIP = 8192  # rows of the head widened at a time


class Lens:
    """One checkpoint's norm and head."""

    def __init__(self, subject: Subject) -> None:
        outer = hf_outer_state(subject.source, subject.architecture)
        self._norm = outer["model.norm.weight"].float()
        self._head = outer.get("lm_head.weight", outer["model.embed_tokens.weight"])
        self._eps = subject.architecture.norm_eps

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states [N, H]."""
        import torch

        x = hidden.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._norm
        return torch.cat([x @ strip.float().T for strip in torch.split(self._head, STRIP)], -1)
