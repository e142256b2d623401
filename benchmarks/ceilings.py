"""What a GPU does at most, measured: the speeds that kernels are held against."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

COPY_BYTES, PRODUCT_SIZE, REPEATS = 1 << 30, 8192, 20


def time_run(run: Callable[[], object]) -> float:
    """Seconds of one run on the current stream, the smallest of many."""
    times = []
    for _ in range(REPEATS + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[3:])


def measure_copies() -> float:
    """Bytes read and written per second by the largest copies."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * COPY_BYTES / time_run(lambda: target.copy_(source))


def measure_products() -> float:
    """16-bit multiplications and additions per second in torch's largest product."""
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * PRODUCT_SIZE**3 / time_run(lambda: a @ b)
