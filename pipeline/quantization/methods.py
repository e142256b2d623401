"""How each method chooses: it answers a `Problem` with a `Choice`. Streaming and folding are not its business.

Which format a method makes, and whether it measures, stands in `selection`, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.quantization import awq, fp8, gptq, rtn, smoothquant, w4a8
from pipeline.quantization.problem import Choice, Problem

CHOOSERS: dict[str, Callable[[Problem], Choice]] = {
    "awq": awq.choose,
    "awq_fp8": w4a8.choose,
    "awq_gptq": gptq.choose_scaled,
    "gptq": gptq.choose,
    "rtn": rtn.choose,
    "rtn_clip": rtn.choose_clipped,
    "fp8": fp8.choose,
    "fp8_blocks": rtn.choose,
    "int8": rtn.choose,
    "smoothquant": smoothquant.choose,
    "awq_zeros": awq.choose,
    "rtn_zeros": rtn.choose,
}
