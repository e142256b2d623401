"""News of a sequence as the tensors of a `tensorrt_llm` response. Shapes begin with batch 1 and, where TensorRT-LLM has
beams, beam 1: a response is always about one sequence, which `batch_index` and `sequence_index` name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pipeline.runtime.handle import Handle, Update
    from pipeline.triton.backend.requests import Wanted

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class Pending:
    """Updates of one sequence, merged until they are sent. `sent`: its tokens that went out before these. `finished`:
    these are the last."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False
    sent: int = 0

    @property
    def has_news(self) -> bool:
        return bool(self.tokens) or self.finished

    def add(self, update: Update) -> None:
        self.tokens += update.tokens
        self.log_probs += update.log_probs or ()
        self.finished = update.finish_reason is not None

    def take(self) -> Pending:
        """What is here now; from now on it counts as sent."""
        taken = Pending(self.tokens, self.log_probs, self.finished, self.sent)
        self.sent += len(self.tokens)
        self.tokens, self.log_probs, self.finished = [], [], False
        return taken


def build_arrays(handle: Handle, pending: Pending, *, row: int, sequence: int, wanted: Wanted) -> Arrays:
    """The response's tensors by name: [1, 1, n] tokens, and what the request asks for beside them."""
    request = handle.request
    ids = pending.tokens
    if not (request.streaming or request.exclude_input_in_output):
        ids = [*request.input_ids, *ids]
    arrays: Arrays = {
        "output_ids": np.array([[ids]], np.int32).reshape(1, 1, len(ids)),
        "sequence_length": np.array([[len(ids)]], np.int32),
        "batch_index": np.array([[row]], np.int32),
        "sequence_index": np.array([[sequence]], np.int32),
    }
    output = handle.partial.outputs[sequence]
    end = pending.sent + len(pending.tokens)
    if request.return_log_probs:
        arrays["output_log_probs"] = np.array([[pending.log_probs]], np.float32).reshape(1, 1, len(pending.log_probs))
        arrays["cum_log_probs"] = np.array([[sum(output.log_probs[:end])]], np.float32)
    if request.return_generation_logits and pending.tokens:
        rows = [logits.numpy() for logits in output.generation_logits[pending.sent : end]]
        arrays["generation_logits"] = np.stack(rows)[None, None].astype(np.float32, copy=False)
    if request.return_context_logits and pending.sent == 0 and (logits := handle.partial.context_logits) is not None:
        arrays["context_logits"] = logits.numpy()[None].astype(np.float32, copy=False)
    if pending.finished:
        arrays |= _build_closing(handle, end, wanted)
    return arrays


def _build_closing(handle: Handle, generated: int, wanted: Wanted) -> Arrays:
    """What is told once, with a sequence's last response."""
    result = handle.partial
    arrays: Arrays = {}
    if wanted.num_input_tokens:
        arrays["num_input_tokens"] = _int32(len(handle.request.input_ids))
    if wanted.num_output_tokens:
        arrays["num_output_tokens"] = _int32(generated)
    if wanted.perf_metrics:
        counts = {
            "kv_cache_alloc_new_blocks": result.new_blocks,
            "kv_cache_reused_blocks": result.reused_blocks,
            "kv_cache_alloc_total_blocks": result.total_blocks,
            "total_accepted_draft_tokens": 0,
            "total_draft_tokens": 0,
        }
        times = {
            "arrival_time_ns": result.timing.arrival,
            "first_scheduled_time_ns": result.timing.first_scheduled,
            "first_token_time_ns": result.timing.first_token,
            "last_token_time_ns": result.timing.last_token,
        }
        arrays |= {name: _int32(count) for name, count in counts.items()}
        arrays |= {name: np.array([[int((seconds or 0) * 1e9)]], np.int64) for name, seconds in times.items()}
        arrays["acceptance_rate"] = np.zeros((1, 1), np.float32)
    return arrays


def _int32(value: int) -> npt.NDArray[np.int32]:
    return np.array([[value]], np.int32)
