"""What the executor counts, under the names of the TensorRT-LLM backend's Prometheus metrics and a few of its own."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.runtime.request import Priority

Labels = tuple[tuple[str, str], ...]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Histogram:
    """counts[i]: values up to bounds[i]; the last one of counts: those above all bounds."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


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
    """Gauges by the names in GAUGES; histograms by those in HISTOGRAMS, one per priority class. `on_observation`, where
    set, is called with the name, the class and the seconds of each observation, on the executor's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = dict.fromkeys(GAUGES, 0)
        self._histograms = {(name, priority): Histogram() for name in HISTOGRAMS for priority in Priority}
        self.on_observation: Callable[[str, Priority, float], None] | None = None

    def set(self, **values: float) -> None:
        with self._lock:
            self._gauges.update(values)

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._gauges[name] += amount

    def observe(self, name: str, priority: Priority, seconds: float) -> None:
        with self._lock:
            self._histograms[name, priority].observe(seconds)
        if self.on_observation is not None:
            self.on_observation(name, priority, seconds)

    def read(self) -> dict[str, float]:
        """Every gauge, at one moment."""
        with self._lock:
            return dict(self._gauges)

    def read_histogram(self, name: str, priority: Priority) -> Histogram:
        """A copy."""
        with self._lock:
            histogram = self._histograms[name, priority]
            return Histogram(histogram.bounds, list(histogram.counts), histogram.total)

    def metrics(self) -> list[tuple[str, Labels, float]]:
        """Gauges as (family, labels, value), ready for an exporter."""
        return [(family, ((label, kind),), value) for (family, label, kind), value in self._pairs()]

    def _pairs(self) -> list[tuple[tuple[str, str, str], float]]:
        return [(GAUGES[name], value) for name, value in self.read().items()]
