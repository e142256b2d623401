"""The compatibility rules of backends `tensorrt_llm` and `llmapi`. What TensorRT-LLM's engines cannot run is a table of
the engine's own (engine/tensorrt_llm/support.py), asked here of the linears as they will be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from pipeline.checkpoint.layouts.scales import BLOCK
from pipeline.config.backends import FOREIGN_LLMAPI_EXPORTS, LLMAPI_EXPORTS, OWN_SETTINGS
from pipeline.config.case import Case
from pipeline.config.recipe_rules import offered_formats
from pipeline.config.rules import Rule
from pipeline.engine.tensorrt_llm.support import LIMITS, Limit
from pipeline.exports.refusals import CUT_BLOCKS, NO_STEP, PER_OUTPUT
from pipeline.quantization.catalog import FP8_BLOCKS
from pipeline.quantization.selection import Decision

ENGINE, PYTORCH = "tensorrt_llm", "llmapi"
# What its mixed precision has none of, but `recipe: auto` may choose.
NEVER_MIXED = ("int8", FP8_BLOCKS)
SAID_BEFORE = ("sizes_divide",)  # every backend's rules of parallel sizes say so


def of_backend(backend: str, find: Callable[[Case], str | None]) -> Callable[[Case], str | None]:
    """`find` where the config is of that backend."""
    return lambda case: find(case) if case.config.target.backend == backend else None


def of_both(find: Callable[[Case], str | None]) -> Callable[[Case], str | None]:
    """`find` where TensorRT-LLM runs the model, by either of its backends."""
    return lambda case: find(case) if case.config.target.world.foreign else None


def _make_rule(limit: Limit) -> Rule:
    def find(case: Case) -> str | None:
        if case.parallel.tensor % case.parallel.expert:
            return None  # no sizes to ask with: the rules of parallel sizes say so
        return limit.find(case.ask)

    return Rule(limit.name, limit.key, of_backend(ENGINE, find), limit.way_out)


def _find_flavour(case: Case) -> str | None:
    wanted, needed = case.config.stages.package.flavour, case.config.target.world.flavour
    if wanted in (None, needed):
        return None
    return f"flavour {wanted} does not serve what backend {case.config.target.backend} makes, which is {needed}'s"


def _find_own_settings(case: Case) -> str | None:
    build = case.build
    set_ = [key for key in OWN_SETTINGS if build.changes(key)]
    return (
        f"{', '.join(set_)}: of trtseek's own network, which {case.config.target.backend} does not use"
        if set_
        else None
    )


def _find_unmixed(case: Case) -> str | None:
    offered = [name for name in offered_formats(case.config) if name in NEVER_MIXED]
    if not case.quantize.recipe.auto or not offered:
        return None
    return f"auto may choose {' and '.join(offered)}, which TensorRT-LLM's mixed precision has not"


def _find_integer_cache(case: Case) -> str | None:
    return "an INT8 KV cache: the PyTorch backend has FP8 ones" if case.quantize.kv_cache == "int8" else None


def _find_unexported(case: Case) -> str | None:
    formats = (*case.formats, *(offered_formats(case.config) if case.quantize.recipe.auto else ()))
    exports = LLMAPI_EXPORTS | FOREIGN_LLMAPI_EXPORTS
    if other := [name for name in formats if name not in exports]:
        return f"{other[0]} is not exported to what the PyTorch backend reads; {', '.join(LLMAPI_EXPORTS)} are"
    for name, held in case.held.items():
        if held.format == "fp8_rows" and (not held.rounds or held.per_output):
            reason = PER_OUTPUT if held.rounds else NO_STEP
            return f"{name.removesuffix('.weight')} cannot be exported as {exports[held.format]}: {reason}"
    if (cut := _find_cut_blocks(case)) is not None:
        return f"{cut} cannot be exported as {exports[FP8_BLOCKS]}: {CUT_BLOCKS}"
    if case.head_format is not None:
        return "lm_head would be quantized, and the PyTorch backend reads one of 16 bits"
    if len({exports[name] for name in formats}) > 1:
        return f"{' and '.join(formats)}: no one checkpoint that the PyTorch backend reads has both"
    return None


def _find_cut_blocks(case: Case) -> str | None:
    """Of linears that are one in the engine and several on the hub, one whose FP8 blocks would cross their seams."""
    for kind in case.kinds:
        starts = list(accumulate(rows for rows, *_ in kind.first.source_shapes))[:-1]
        if any(start % BLOCK for start in starts) and any(
            isinstance(each, Decision) and each.format == FP8_BLOCKS for each in case.quantize.rules.count(kind)
        ):
            return kind.first.target.removesuffix(".weight")
    return None


TENSORRT_LLM_RULES: tuple[Rule, ...] = (
    Rule("flavour_of_backend", "stages.package.flavour", _find_flavour, "leave flavour out"),
    Rule(
        "own_settings",
        "stages.build",
        of_both(_find_own_settings),
        "leave them out, or take target.backend: tensorrt_rtx",
    ),
    *(_make_rule(limit) for limit in LIMITS if limit.name not in SAID_BEFORE),
    Rule(
        "auto_is_mixed",
        "stages.quantize.sensitivity.formats",
        of_backend(ENGINE, _find_unmixed),
        "set stages.quantize.sensitivity.formats: [int4, fp8]",
    ),
    Rule(
        "no_int8_cache",
        "stages.quantize.kv_cache",
        of_backend(PYTORCH, _find_integer_cache),
        "set kv_cache: fp8 or none, or take target.backend: tensorrt_llm",
    ),
    Rule(
        "loaded_in_pytorch",
        "stages.quantize.method",
        of_backend(PYTORCH, _find_unexported),
        "take method: awq, fp8 or fp8_blocks for all of it, or target.backend: tensorrt_llm",
    ),
)
