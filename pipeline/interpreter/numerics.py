"""The arithmetic modes: which torch type holds a tensor of a declared type.

`exact`: every 16- and 32-bit float is held and computed in fp32, so that what is left between the program and another
implementation in fp32 is the order of sums; and that order is the same in any company, so that a sequence's values do
not depend, to the last bit, on the batch, the chunks or the padding it runs in. `declared`: every tensor is rounded to
the type the network declares for it, as TensorRT's strong typing does; sums still accumulate in fp32, as its kernels
do.
`fast`: 16-bit floats are all bf16 where the processor multiplies it fast, and fp32 elsewhere; kernels are chosen by
the number of rows; packed INT4 and INT8 weights multiply inputs that are rounded to 16-bit integers, and INT4 those of
many rows rounded to 8 bits, as llama.cpp does (native/linear.c); what a fused kernel keeps wider than declared stays
so, and attention may round scores and probabilities to bf16, as transformers' eager attention does. Integers, booleans
and quantized types are the same in all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from pipeline.errors import CompatibilityError

Mode = Literal["exact", "declared", "fast"]

# Fast mode picks another token than exact mode only where the best two logits of exact mode are closer than this, in
# units of the row's standard deviation over the vocabulary. Seen at most: 0.076 (deepseek-coder-tiny, 600 held-out
# tokens, 11 others), 0.060 (SmolLM2-135M, 600, 15 others), 0.030 (deepseek-v2-tiny, 2000, 33 others), INT4 and fp16;
# where inputs are rounded to 8 bits (2048 tokens of each in chunks of 64) 0.007, 0.141 and 0.019, 10, 60 and 4 others.
# In a routed model, a near tie of two experts moves a row's logits further than rounding does: by more than half of
# this in 6 of 1000 rows of deepseek-v2-tiny, by 0.42 at most; tokens still differed inside the margin only.
FAST_MARGIN = 0.25

FLOATS = frozenset({"float32", "float16", "bfloat16"})
# Declared type -> what holds it. INT4 values are unpacked to one byte each before anything reads them.
HELD_AS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "int4": torch.int8,
    "fp8": torch.float8_e4m3fn,
}

NATIVE = (torch.bfloat16, torch.float32)  # what the kernels in C take


@dataclass(frozen=True, slots=True)
class Numerics:
    """One mode's types."""

    mode: Mode

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise CompatibilityError(
                f"interpreter mode {self.mode!r} is unknown", hint=f"known modes: {', '.join(get_args(Mode))}"
            )

    def held(self, declared: str) -> torch.dtype:
        """The torch type of a tensor that the network declares as `declared`."""
        if self.mode == "exact" and declared in FLOATS:
            return torch.float32
        if self.mode == "fast" and declared in FLOATS:
            return multiplied_as(HELD_AS["bfloat16" if declared == "float16" else declared])
        return HELD_AS[declared]


def multiplied_as(held: torch.dtype) -> torch.dtype:
    """The type that factors of this type are widened to, which is exact, where this processor multiplies fp32 several
    times as fast: fp16 on any x86, bf16 where there is neither AVX-512 nor an instruction of its own for it (AVX2)."""
    if held is torch.float16 or (held is torch.bfloat16 and not _multiplies_bf16()):
        return torch.float32
    return held


@functools.cache
def _multiplies_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
