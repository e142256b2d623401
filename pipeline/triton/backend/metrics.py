"""The executor's statistics on Triton's metrics endpoint, under the TensorRT-LLM backend's names and a few more."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

from pipeline.runtime.request import Priority
from pipeline.runtime.statistics import HISTOGRAMS

if TYPE_CHECKING:
    from pipeline.runtime.statistics import Labels, Statistics

# Upper bounds of the histograms' buckets.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Families that only ever grow; the others go up and down.
COUNTERS = frozenset({"nv_trt_llm_prefix_cache_metrics", "nv_trt_llm_token_metrics", "nv_trt_llm_request_events"})
HELP = {
    "nv_trt_llm_request_metrics": "Requests, by what becomes of them",
    "nv_trt_llm_kv_cache_block_metrics": "Blocks of the KV cache",
    "nv_trt_llm_inflight_batcher_metrics": "The last step of the in-flight batcher",
    "nv_trt_llm_general_metrics": "Steps so far",
    "nv_trt_llm_prefix_cache_metrics": "Prompt tokens, and those of them that were found in the cache",
    "nv_trt_llm_token_metrics": "Tokens generated",
    "nv_trt_llm_request_events": "Requests that ended, by how, and pauses",
    "nv_trt_llm_time_to_first_token_seconds": "From a request's arrival to its first token",
    "nv_trt_llm_time_per_output_token_seconds": "Mean time between a request's tokens",
    "nv_trt_llm_queue_time_seconds": "From a request's arrival to its first step",
}


class Metrics:
    """`publish` is called by one thread, now and then: each value that changed is a round trip to Triton's process."""

    def __init__(self, statistics: Statistics, module: Any, *, model: str, version: str) -> None:
        self._statistics, self._module = statistics, module
        self._labels = {"model": model, "version": version}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, Labels], Any] = {}
        self._published: dict[tuple[str, Labels], float] = {}
        self._observed: queue.SimpleQueue[tuple[str, Priority, float]] = queue.SimpleQueue()
        self._histograms = self._make_histograms()
        statistics.on_observation = lambda *observation: self._observed.put(observation)
        self.publish()

    def publish(self) -> None:
        for family, labels, value in self._statistics.metrics():
            key = (family, labels)
            before = self._published.get(key)
            if value == before:
                continue
            metric = self._metrics.get(key) or self._make(family, labels)
            if family in COUNTERS:
                metric.increment(value - (before or 0.0))
            else:
                metric.set(value)
            self._published[key] = value
        while not self._observed.empty():
            name, priority, seconds = self._observed.get()
            self._histograms[name, priority].observe(seconds)

    def _make(self, family: str, labels: Labels) -> Any:
        kind = "COUNTER" if family in COUNTERS else "GAUGE"
        metric = self._family(family, kind).Metric(labels={**self._labels, **dict(labels)})
        self._metrics[family, labels] = metric
        return metric

    def _make_histograms(self) -> dict[tuple[str, Priority], Any]:
        return {
            (name, priority): self._family(family, "HISTOGRAM").Metric(
                labels={**self._labels, "priority_class": priority.name}, buckets=list(SECONDS)
            )
            for name, family in HISTOGRAMS.items()
            for priority in Priority
        }

    def _family(self, name: str, kind: str) -> Any:
        if name not in self._families:
            families = self._module.MetricFamily
            self._families[name] = families(name=name, description=HELP.get(name, name), kind=getattr(families, kind))
        return self._families[name]
