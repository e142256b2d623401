"""What a GPU does at most, measured: the speeds that kernels are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

COPY_BYTES, PRODUCT_SIZE = 1 << 30, 8192
FLUSHED_BYTES = 1 << 29  # more than any L2 cache holds, and longer to write than most runs take to start
BUDGET, FEWEST_RUNS, MOST_RUNS = 0.05, 3, 100  # seconds of all runs, about


def time_run(run: Callable[[], object]) -> float:
    """Seconds that one run takes of the GPU: the median of many, each after the L2 cache was emptied, which also hides
    how long the host takes to start it. Nothing of Triton's own driver, which wants a C compiler."""
    cuda: Any = torch.cuda  # whose classes have no types
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    run()
    cuda.synchronize()
    began = time.perf_counter()
    run()
    cuda.synchronize()
    runs = int(BUDGET / (time.perf_counter() - began))
    pairs = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(min(max(runs, FEWEST_RUNS), MOST_RUNS))]
    for begin, end in pairs:
        flushed.zero_()
        begin.record()
        run()
        end.record()
    cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3


def measure_copies() -> float:
    """Bytes read and written per second by the largest copies."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * COPY_BYTES / time_run(lambda: target.copy_(source))


def measure_products() -> float:
    """16-bit multiplications and additions per second in torch's largest product."""
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * PRODUCT_SIZE**3 / time_run(lambda: a @ b)
