"""What cannot be done with a model that another tool has quantized, and what must be known of it."""

from __future__ import annotations

from pipeline.config.case import FP8_TYPES, Case
from pipeline.config.rules import Rule
from pipeline.engine.tensorrt_llm.mixed_gemm import DATACENTER_BLACKWELL
from pipeline.engine.tensorrt_llm.support import NO_INTEGERS

WEIGHTS, INTEGERS = (".weight", ".qweight", ".weight_packed"), ("I8", "U8", "I32")


def _find_second_rounding(case: Case) -> str | None:
    if case.foreign_mark is None or not case.is_quantized:
        return None
    return f"the model is quantized already ({case.foreign_mark} is there), and would be rounded once more"


def _find_fp8(case: Case) -> str | None:
    """Whatever type is asked for: that is of what is not quantized."""
    if case.foreign_mark is None or case.gpu.has("fp8"):
        return None
    if not any(t.dtype in FP8_TYPES for t in case.tensors.values()):
        return None
    return f"the model's FP8 weights need FP8 tensor cores, SM89 or later; the {case.gpu.name} is SM{case.gpu.sm}"


def _find_integers_on_blackwell(case: Case) -> str | None:
    """What the job itself would refuse, after all proofs: what is left in 16 bits is known only once it is read."""
    target, is_exact = case.config.target, case.config.stages.convert.foreign == "exact"
    if case.foreign_mark is None or target.backend != "tensorrt_llm" or not is_exact:
        return None
    if case.gpu.sm not in DATACENTER_BLACKWELL:
        return None
    found = next((name for name, t in case.tensors.items() if name.endswith(WEIGHTS) and t.dtype in INTEGERS), None)
    return f"{found} is INT4 or INT8, which {NO_INTEGERS}; this is SM{case.gpu.sm}" if found else None


def _note_plan(case: Case) -> str | None:
    if case.foreign_mark is None:
        return None
    return "the model is quantized already: the plan counts its linears in 16 bits, and they take less"


FOREIGN_RULES: tuple[Rule, ...] = (
    Rule("quantized_once", "stages.quantize.method", _find_second_rounding, "set stages.quantize.method: none"),
    Rule(
        "foreign_integers",
        "target.gpu",
        _find_integers_on_blackwell,
        "take backend tensorrt, which builds them for that GPU, or another quantization of the model",
    ),
    Rule("foreign_fp8", "target.gpu", _find_fp8, "take a GPU of SM89 or later, or another quantization of the model"),
)
FOREIGN_NOTES: tuple[Rule, ...] = (Rule("counted_wide", "stages.convert.foreign", _note_plan, ""),)
