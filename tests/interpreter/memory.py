"""Peak of what torch holds during some work, counted from its own allocator's events."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def measure_peak(work: Callable[[], object]) -> int:
    """Bytes above the level at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    held = peak = 0
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
