"""What a GPU does at most, measured: the speeds that kernels are held against."""

from __future__ import annotations

from collections.abc import Callable

import torch

COPY_BYTES, PRODUCT_SIZE = 1 << 30, 8192


def time_run(run: Callable[[], object]) -> float:
    """Seconds that one run takes of the GPU: the median of many, each after the L2 cache was emptied, which also hides
    how long the host takes to start it."""
    from triton.testing import do_bench

    milliseconds: float = do_bench(run, warmup=5, rep=30, return_mode="median")
    return milliseconds / 1e3


def measure_copies() -> float:
    """Bytes read and written per second by the largest copies."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * COPY_BYTES / time_run(lambda: target.copy_(source))


def measure_products() -> float:
    """16-bit multiplications and additions per second in torch's largest product."""
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * PRODUCT_SIZE**3 / time_run(lambda: a @ b)
