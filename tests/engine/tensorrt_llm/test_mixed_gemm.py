"""The processed order of integer weights, against digests of what TensorRT-LLM's own function makes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pipeline.engine.tensorrt_llm.mixed_gemm import process
from pipeline.errors import CompatibilityError

INPUTS, OUTPUTS = 128, 192
# SHA-256 of preprocess_weights_for_mixed_gemm(weight, torch.quint4x2 or torch.int8, torch.float16, sm), run from
# TensorRT-LLM's quantization/functional.py (2026) on `draw`'s numbers; INT4 packed along the outputs, low nibble first.
DIGESTS = {
    (4, 80): "1b0c79e30d34d95f",
    (4, 89): "1b0c79e30d34d95f",
    (4, 90): "04f77a54d6526b03",
    (4, 120): "1b0c79e30d34d95f",
    (8, 80): "edacf231f92f7462",
    (8, 89): "edacf231f92f7462",
    (8, 90): "68e863d2a8e0e05f",
    (8, 120): "edacf231f92f7462",
}


def draw(bits: int) -> np.ndarray:
    k = np.arange(INPUTS * OUTPUTS, dtype=np.int64).reshape(INPUTS, OUTPUTS)
    return ((k * 7919 + k // 13) % (1 << bits) - (1 << (bits - 1))).astype(np.int8)


@pytest.mark.parametrize(("bits", "sm"), DIGESTS)
def test_order_is_tensorrt_llms(bits: int, sm: int) -> None:
    assert hashlib.sha256(process(draw(bits), bits, sm).tobytes()).hexdigest()[:16] == DIGESTS[bits, sm]


def test_shapes_and_gpus_without_kernels() -> None:
    with pytest.raises(CompatibilityError, match="not multiples of 64"):
        process(draw(4)[:100], 4, 80)
    with pytest.raises(CompatibilityError, match="no INT8 weights for SM103"):
        process(draw(8), 8, 103)
