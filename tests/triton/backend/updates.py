"""What an executor hands on, without one: a request's handle, and news of it."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.runtime.handle import Handle, Output, Result, Timing, Update
from pipeline.runtime.request import FinishReason, Request

VOCABULARY = 4


class Running:
    """A request that runs. `step` is what the executor does: it adds to the result, and tells of it."""

    def __init__(self, sequences: int = 1, **options: Any) -> None:
        options = {"streaming": True, "num_return_sequences": sequences, **options}
        self.request = Request(input_ids=(7, 8, 9), max_tokens=100, **options)
        self.result = Result(
            request_id="r",
            outputs=[Output() for _ in range(sequences)],
            seed=0,
            timing=Timing(arrival=1.0, first_scheduled=2.0, first_token=3.0, last_token=4.0),
            reused_blocks=2,
            new_blocks=3,
        )
        self.cancelled = self.completed = 0
        self.handle = Handle(self.request, self.result, end=self._end)

    def _end(self, handle: Handle, reason: FinishReason) -> None:
        self.cancelled += reason is FinishReason.CANCELLED
        self.completed += reason is FinishReason.STOP_WORDS

    def step(
        self, *tokens: int, sequence: int = 0, reason: FinishReason | None = None, is_final: bool = False
    ) -> Update:
        """The log-prob of token t is -t / 8, its logits are t."""
        output = self.result.outputs[sequence]
        log_probs = [-token / 8 for token in tokens]
        output.tokens += tokens
        output.finish_reason = reason
        if self.request.return_log_probs:
            output.log_probs += log_probs
        if self.request.return_generation_logits:
            output.generation_logits += [torch.full((VOCABULARY,), float(token)) for token in tokens]
        return Update(
            request=self.request,
            request_id="r",
            sequence_index=sequence,
            tokens=list(tokens),
            log_probs=log_probs if self.request.return_log_probs else None,
            finish_reason=reason,
            is_final=is_final,
        )

    def end(self, *tokens: int, sequence: int = 0, reason: FinishReason = FinishReason.LENGTH) -> Update:
        return self.step(*tokens, sequence=sequence, reason=reason, is_final=True)
