"""What cannot be done with a model that another tool has quantized, and what must be known of it."""

from __future__ import annotations

from pipeline.checkpoint.foreign.holding import WAY_OUT, tell_widened
from pipeline.config.case import FP8_TYPES, Case
from pipeline.config.rules import Rule


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


def _find_unheld(case: Case) -> str | None:
    """What `convert` itself would refuse."""
    problem = tell_widened(case.holding) if case.config.stages.convert.foreign == "exact" else None
    return f"{case.config.model.path}: {problem}" if problem else None


FOREIGN_RULES: tuple[Rule, ...] = (
    Rule("quantized_once", "stages.quantize.method", _find_second_rounding, "set stages.quantize.method: none"),
    Rule("held_exactly", "stages.convert.foreign", _find_unheld, WAY_OUT),
    Rule("foreign_fp8", "target.gpu", _find_fp8, "take a GPU of SM89 or later, or another quantization of the model"),
)
