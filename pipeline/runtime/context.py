"""Logits and log-probs of a prompt, gathered over the chunks that it is computed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.runtime.handle import Result
from pipeline.runtime.request import Request

if TYPE_CHECKING:
    from torch import Tensor


class Context:
    """For one request that wants either."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.clear()

    def clear(self) -> None:
        """The prompt is to be computed again from its beginning."""
        self._logits: list[Tensor] = []
        self._log_probs: list[float] = []

    def add(self, logits: Tensor, start: int) -> None:
        """logits [n, V] of the prompt's tokens from `start`: each row is about the token after it."""
        import torch

        from pipeline.runtime.sampler import log_probs

        if self.request.return_context_logits:
            self._logits.append(logits.to("cpu", copy=True))
        if self.request.return_context_log_probs:
            following = torch.tensor(self.request.input_ids[start + 1 : start + 1 + len(logits)], device=logits.device)
            self._log_probs += log_probs(logits[: len(following)], following).tolist() if len(following) else []

    def fill(self, result: Result) -> None:
        """When all of the prompt was added."""
        import torch

        if self.request.return_context_logits:
            result.context_logits = torch.cat(self._logits)
        if self.request.return_context_log_probs:
            result.context_log_probs = self._log_probs
