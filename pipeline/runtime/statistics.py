"""What the executor counts, under the names of the TensorRT-LLM backend's Prometheus metrics and a few of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeline.runtime.request import Priority

Labels = tuple[tuple[str, str], ...]


# Gauge of Statistics -> family, label, value of the label. The first nine are TensorRT-LLM's own.
GAUGES: dict[str, tuple[str, str, str]] = {
    "active_requests": ("nv_trt_llm_request_metrics", "request_type", "active"),
    "max_requests": ("nv_trt_llm_request_metrics", "request_type", "max"),
    "scheduled_requests": ("nv_trt_llm_request_metrics", "request_type", "scheduled"),
    "context_requests": ("nv_trt_llm_request_metrics", "request_type", "context"),
    "used_blocks": ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "used"),
    "free_blocks": ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "free"),
    "max_blocks": ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "max"),
    "tokens_per_block": ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "tokens_per"),
    "block_fraction": ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "fraction"),
    "generation_requests": (
        "nv_trt_llm_inflight_batcher_metrics",
        "inflight_batcher_specific_metric",
        "generation_requests",
    ),
    "context_tokens": (
        "nv_trt_llm_inflight_batcher_metrics",
        "inflight_batcher_specific_metric",
        "total_context_tokens",
    ),
    "micro_batch_id": ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric", "micro_batch_id"),
    "iterations": ("nv_trt_llm_general_metrics", "general_type", "iteration_counter"),
    "waiting_requests": ("nv_trt_llm_request_metrics", "request_type", "waiting"),
    "cached_blocks": ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "cached"),
    "pinned_blocks": ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "pinned"),
    "prefix_hit_tokens": ("nv_trt_llm_prefix_cache_metrics", "prefix_cache_type", "hit_tokens"),
    "prompt_tokens": ("nv_trt_llm_prefix_cache_metrics", "prefix_cache_type", "prompt_tokens"),
    "generated_tokens": ("nv_trt_llm_token_metrics", "token_type", "generated"),
    "paused_total": ("nv_trt_llm_request_events", "event", "paused"),
    "completed_total": ("nv_trt_llm_request_events", "event", "completed"),
    "cancelled_total": ("nv_trt_llm_request_events", "event", "cancelled"),
    "timed_out_total": ("nv_trt_llm_request_events", "event", "timed_out"),
    "failed_total": ("nv_trt_llm_request_events", "event", "failed"),
    "rejected_total": ("nv_trt_llm_request_events", "event", "rejected"),
}
HISTOGRAMS = {
    "time_to_first_token": "nv_trt_llm_time_to_first_token_seconds",
    "time_per_token": "nv_trt_llm_time_per_output_token_seconds",
    "queue_time": "nv_trt_llm_queue_time_seconds",
}


class Statistics:
    """Gauges by the names in GAUGES. `on_observation`, where set, is called with the name (of HISTOGRAMS), the priority
    class and the seconds of each observation, on the executor's thread: the histograms themselves are the server's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = dict.fromkeys(GAUGES, 0)
        self.on_observation: Callable[[str, Priority, float], None] | None = None

    def set(self, **values: float) -> None:
        with self._lock:
            self._gauges.update(values)

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._gauges[name] += amount

    def observe(self, name: str, priority: Priority, seconds: float) -> None:
        if self.on_observation is not None:
            self.on_observation(name, priority, seconds)

    def read(self) -> dict[str, float]:
        """Every gauge, at one moment."""
        with self._lock:
            return dict(self._gauges)

    def metrics(self) -> list[tuple[str, Labels, float]]:
        """Gauges as (family, labels, value), ready for an exporter."""
        return [(family, ((label, kind),), value) for (family, label, kind), value in self._pairs()]

    def _pairs(self) -> list[tuple[tuple[str, str, str], float]]:
        return [(GAUGES[name], value) for name, value in self.read().items()]
