"""What types and quantization cannot do: on this GPU, with these shapes, with each other. The table is in rules.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.network.spec import CACHE_PLUGINS
from pipeline.quantization.catalog import FOREIGN_FORMATS, FORMATS, METHODS
from pipeline.quantization.selection import Decision

if TYPE_CHECKING:
    from pipeline.config.case import Case

FIRST_AMPERE = 80
FP8_FORMATS = ("fp8", "fp8_blocks", "int4_fp8")
FP8_METHODS = tuple(name for name, row in METHODS.items() if row.format in FP8_FORMATS)
W4A8 = "awq_fp8"


def find_fp8(case: Case) -> str | None:
    method = _find_fp8_method(case)
    return method and _refuse_fp8(case, f"method {method}")


def place_fp8(case: Case) -> str:
    return _place(case, _find_fp8_method(case), otherwise="target.gpu")


def _find_fp8_method(case: Case) -> str | None:
    return next((name for name in FP8_METHODS if name in case.quantize.rules.methods), None)


def find_fp8_source(case: Case) -> str | None:
    return case.kept_fp8 and _refuse_fp8(case, f"the FP8 tensor {case.kept_fp8}")


def _refuse_fp8(case: Case, what: str) -> str | None:
    if case.gpu.has("fp8"):
        return None
    return f"{what} needs FP8 tensor cores, SM89 or later; the {case.gpu.name} is SM{case.gpu.sm}"


def _place(case: Case, method: str | None, *, otherwise: str) -> str:
    """The recipe's first row of a method; `otherwise` where none has it: then stages.quantize.method does."""
    rows = case.quantize.recipe.rows
    row = next((index for index, row in enumerate(rows) if row.method == method), None)
    return otherwise if row is None else f"stages.quantize.recipe.rows.{row}.method"


def find_foreign_method(case: Case) -> str | None:
    """The network of a W4A8 linear runs in the interpreter, for proofs; TensorRT has no kernel for it."""
    if case.config.target.backend == "tensorrt_llm" or W4A8 not in case.quantize.rules.methods:
        return None
    return f"method {W4A8} is what TensorRT-LLM's W4A8 kernels compute; {case.config.target.backend} has none"


def place_w4a8(case: Case) -> str:
    return _place(case, W4A8, otherwise="stages.quantize.method")


def find_bf16(case: Case) -> str | None:
    if case.dtype != "bfloat16" or case.gpu.has("bf16"):
        return None
    return f"weights in bfloat16 need SM80 or later; the {case.gpu.name} is SM{case.gpu.sm}"


def find_turing(case: Case) -> str | None:
    """TensorRT-RTX 1.7 says "HW-specific datatypes: int4" and "FP32 GEMM is not supported" for SM75."""
    if case.gpu.sm >= FIRST_AMPERE or case.config.target.backend != "tensorrt_rtx":
        return None
    what = (
        "INT4 weights"
        if any((FORMATS | FOREIGN_FORMATS)[name].bits == 4 for name in case.formats)
        else "float32 weights"
        if case.dtype == "float32"
        else "routed experts, whose router runs in float32,"
        if case.architecture.experts
        else None
    )
    return what and f"tensorrt_rtx builds {what} for SM80 and later; the {case.gpu.name} is SM{case.gpu.sm}"


def find_unmatched_exclude(case: Case) -> str | None:
    if not case.is_quantized:
        return None
    unused = [pattern for pattern in case.quantize.exclude if not case.matches(pattern)]
    return f"{', '.join(unused)} matches no linear of the model" if unused else None


def find_nothing_chosen(case: Case) -> str | None:
    if not case.is_quantized or case.chosen or case.quantize.recipe.rows:
        return None
    roles = sorted({linear.role for linear in case.linears})
    return f"no linear is left to quantize; the model has {', '.join(roles)}"


def find_no_group(case: Case) -> str | None:
    if not case.is_quantized or not case.chosen:
        return None
    if any(isinstance(linear.decision, Decision) for linear in case.chosen):
        return None
    widths = sorted({linear.in_features for linear in case.chosen})
    return f"no group size up to {case.quantize.group_size} divides any input width ({', '.join(map(str, widths))})"


def find_split_experts(case: Case) -> str | None:
    """Which the network would refuse, after all the work."""
    rules = case.quantize.rules
    if not case.is_quantized or not (rules.exclude or rules.recipe):
        return None
    for kind in case.kinds:
        other = rules.find_split(kind)
        if other is not None:
            return (
                f"{other} would be in another format than other experts of its layer; their weights are one stack, "
                "which has one"
            )
    return None


def find_fp8_cache(case: Case) -> str | None:
    if case.quantize.kv_cache != "fp8" or case.gpu.has("fp8"):
        return None
    return f"an FP8 KV cache needs SM89 or later; the {case.gpu.name} is SM{case.gpu.sm}"


def find_cache_without_plugins(case: Case) -> str | None:
    kind, lowering = case.quantize.kv_cache, case.build.lowering.model_dump()
    missing = [name for name in CACHE_PLUGINS if lowering[name] != "plugin"]
    if kind == "none" or not missing or case.config.target.world.foreign:
        return None
    return (
        f"TensorRT's own cache layer takes no 8-bit one: a KV cache in {kind} is written and read by the plugins "
        f"{' and '.join(CACHE_PLUGINS)}, and {' and '.join(missing)} would be native"
    )


def find_lone_cache(case: Case) -> str | None:
    if case.quantize.kv_cache == "none" or case.is_quantized:
        return None
    return f"kv_cache: {case.quantize.kv_cache} with method: none: its scales go into a quantized checkpoint"
