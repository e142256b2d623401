"""The compatibility rules of backends `tensorrt_llm` and `llmapi`: what TensorRT-LLM refuses or gets wrong, each with
the backend that can. They are of its 1.2.x sources and documentation, read; neither backend was run."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.config.backends import OWN_SETTINGS
from pipeline.config.case import Case
from pipeline.config.rules import Rule
from pipeline.quantization.selection import FORMATS, Decision

FIRST_FP8 = 89
# builder.py: "INT8/INT4 quantization is not supported on SM>=100"; GeForce Blackwell, SM120, is not meant.
NO_INTEGERS = range(100, 120)
INTEGERS = ("int4", "int8", "int8_sq")
# Of a routed MLP: SharedMoE takes no argument of the other formats (models/deepseek_v1, layers/moe.py).
ROUTED_FORMATS = ("fp8",)
BLOCKS = "fp8_blocks"
RTX = "target.backend: tensorrt_rtx"
LLMAPI = "target.backend: llmapi"


def of_backend(backend: str, find: Callable[[Case], str | None]) -> Callable[[Case], str | None]:
    """`find` where the config is of that backend."""
    return lambda case: find(case) if case.config.target.backend == backend else None


def _of_both(find: Callable[[Case], str | None]) -> Callable[[Case], str | None]:
    return lambda case: find(case) if case.config.target.world.foreign else None


def _find_flavour(case: Case) -> str | None:
    wanted, needed = case.config.stages.package.flavour, case.config.target.world.flavour
    if wanted in (None, needed):
        return None
    return f"flavour {wanted} does not serve what backend {case.config.target.backend} makes, which is {needed}'s"


def _find_own_settings(case: Case) -> str | None:
    build = case.build
    set_ = [key for key in OWN_SETTINGS if getattr(build, key) != type(build).model_fields[key].default]
    return (
        f"{', '.join(set_)}: of trtseek's own network, which {case.config.target.backend} does not use"
        if set_
        else None
    )


def _find_latent(case: Case) -> str | None:
    if case.architecture.latent is None:
        return None
    return (
        f"{case.architecture.name}: TensorRT-LLM's engines never ran its latent attention (MLA) in all of 1.x; V3 is "
        "not among their models at all"
    )


def _find_routed_format(case: Case) -> str | None:
    other = [name for name in case.formats if name not in ROUTED_FORMATS]
    if case.architecture.experts is None or not other:
        return None
    return f"{FORMATS[other[0]].quant_algo}: TensorRT-LLM's engines have no such experts; they run in 16 bits and FP8"


def _find_expert_parallel(case: Case) -> str | None:
    size = case.parallel.expert
    if size == 1 or not case.is_quantized:
        return None
    return f"expert parallel size {size}: TensorRT-LLM's engines quantize no model whose experts are spread over ranks"


def _find_float32(case: Case) -> str | None:
    return "float32 weights: TensorRT-LLM's plugins take 16-bit ones" if case.dtype == "float32" else None


def _find_blocks(case: Case) -> str | None:
    stored = case.kept_fp8
    if BLOCKS not in case.formats and stored is None:
        return None
    what = f"the FP8 blocks of {stored}" if stored else f"method {BLOCKS}"
    return f"{what}: only TensorRT-LLM's PyTorch backend reads weights in 128 x 128 blocks"


def _find_integers(case: Case) -> str | None:
    found = [name for name in case.formats if name in INTEGERS]
    if case.gpu.sm not in NO_INTEGERS or not found:
        return None
    return (
        f"{FORMATS[found[0]].quant_algo} on the {case.gpu.name}: TensorRT-LLM refuses INT4 and INT8 on SM{case.gpu.sm}"
    )


def _find_mixture(case: Case) -> str | None:
    """`quant_algo` and `group_size` are one of each in a checkpoint's config.json."""
    if case.quantize.recipe.auto or len(case.formats) > 1:
        what = "recipe: auto" if case.quantize.recipe.auto else ", ".join(case.formats)
        return f"mixed precision ({what}): a checkpoint for an engine has one format"
    groups = {linear.group for linear in case.chosen if isinstance(linear.decision, Decision) and linear.group}
    if len(groups) > 1:
        return f"groups of {' and '.join(map(str, sorted(groups)))}: a checkpoint for an engine has one group size"
    return None


def _find_cache(case: Case) -> str | None:
    if case.quantize.kv_cache == "fp8" and case.gpu.sm < FIRST_FP8:
        return f"an FP8 KV cache needs SM{FIRST_FP8} or later; the {case.gpu.name} is SM{case.gpu.sm}"
    return None


def _find_integer_cache(case: Case) -> str | None:
    return "an INT8 KV cache: the PyTorch backend has FP8 ones" if case.quantize.kv_cache == "int8" else None


_ENGINE = "tensorrt_llm"
TENSORRT_LLM_RULES: tuple[Rule, ...] = (
    Rule("flavour_of_backend", "stages.package.flavour", _find_flavour, "leave flavour out"),
    Rule("own_settings", "stages.build", _of_both(_find_own_settings), f"leave them out, or take {RTX}"),
    Rule("no_mla_engines", "target.backend", of_backend(_ENGINE, _find_latent), f"take {RTX}, or {LLMAPI}"),
    Rule(
        "experts_in_fp8",
        "stages.quantize.method",
        of_backend(_ENGINE, _find_routed_format),
        f"take method: fp8 or none, {RTX} for INT4 and INT8 experts, or {LLMAPI}",
    ),
    Rule(
        "whole_experts_quantized",
        "target.parallel.expert",
        of_backend(_ENGINE, _find_expert_parallel),
        "set target.parallel.expert: 1, which splits the experts' columns, or method: none",
    ),
    Rule(
        "engines_in_16_bits",
        "stages.convert.dtype",
        of_backend(_ENGINE, _find_float32),
        "set stages.convert.dtype: float16",
    ),
    Rule("no_blocks", "stages.quantize.method", of_backend(_ENGINE, _find_blocks), f"take method: fp8, or {LLMAPI}"),
    Rule(
        "no_integers_on_blackwell",
        "target.gpu",
        _of_both(_find_integers),
        "take method: fp8, or target.backend: tensorrt on that GPU",
    ),
    Rule(
        "one_format",
        "stages.quantize",
        of_backend(_ENGINE, _find_mixture),
        f"take one method, and a group_size that divides every input, or {RTX}",
    ),
    Rule("fp8_cache_needs_sm89", "stages.quantize.kv_cache", _of_both(_find_cache), "set kv_cache: none or int8"),
    Rule(
        "no_int8_cache",
        "stages.quantize.kv_cache",
        of_backend("llmapi", _find_integer_cache),
        "set kv_cache: fp8 or none, or take target.backend: tensorrt_llm",
    ),
)
