"""What works but must be known."""

from __future__ import annotations

import re
from collections import Counter

from pipeline.config.case import Case
from pipeline.config.rules import Rule


def _note_backend(case: Case) -> str | None:
    return case.gpu.notes.get(case.config.target.backend)


def _note_smaller_groups(case: Case) -> str | None:
    groups: Counter[tuple[str, int | None]] = Counter()
    sizes = set()
    for linear in case.chosen:
        if isinstance(linear.decision, str) or linear.decision.is_smaller:
            groups[re.sub(r"\b\d+\b", "*", linear.name), linear.group] += linear.count
            sizes.add(linear.wanted)
    texts = [
        f"{name} ({n}x): {f'groups of {group}' if group else 'stays 16-bit'}" for (name, group), n in groups.items()
    ]
    wanted = ", ".join(map(str, sorted(sizes, reverse=True)))
    return f"group size {wanted} does not divide every input: {'; '.join(texts)}" if texts else None


def _note_fp8_blocks(case: Case) -> str | None:
    if case.kept_fp8 is None:
        return None
    return (
        "FP8 blocks stay in the engine and are multiplied out at every step: they save memory, not time, and the "
        "workspace holds the widest of them in 16 bits, a routed layer's stack of experts at once"
    )


def _note_made_blocks(case: Case) -> str | None:
    if "fp8_blocks" not in case.quantize.rules.methods:
        return None
    return (
        "FP8 blocks are multiplied out at every step: they save memory, not time; method fp8 is the one whose products "
        "are in FP8"
    )


def _note_unread_scales(case: Case) -> str | None:
    if case.quantize.kv_cache == "none" or case.config.target.backend != "llmapi":
        return None
    return (
        f"the checkpoint has the calibrated scales of the cache in {case.quantize.kv_cache}, and prove measures the "
        "cache that has them; whether the release that serves it reads them is not known here: sources of 1.2 load "
        "them for NVFP4 caches alone"
    )


def _note_stripped(case: Case) -> str | None:
    if case.build.weights != "stripped":
        return None
    return "the engine is built without weights: `trtseek refit` brings them on the GPU host, before it is served"


def _note_plugins(case: Case) -> str | None:
    lowering, idle = case.build.lowering, () if case.architecture.experts else ("moe_experts", "moe_all_to_all")
    plugins = [name for name, how in lowering.model_dump().items() if how == "plugin" and name not in idle]
    if not plugins:
        return None
    return f"{', '.join(plugins)}: engine.json says whether these plugins' kernels have passed on an SM{case.gpu.sm}"


def _note_no_experts(case: Case) -> str | None:
    lowering = case.build.lowering
    is_asked = lowering.moe_experts == "plugin" and "moe_experts" in lowering.model_fields_set
    if not is_asked or case.architecture.experts is not None:
        return None
    return f"moe_experts has nothing to do: {case.architecture.name} has no routed experts"


def _note_lone_exchange(case: Case) -> str | None:
    if case.build.lowering.moe_all_to_all != "plugin" or case.parallel.expert > 1:
        return None
    return "moe_all_to_all has nothing to exchange: with expert parallel size 1 every GPU has all experts"


def _note_exchange(case: Case) -> str | None:
    if case.build.lowering.moe_all_to_all != "plugin" or case.parallel.expert == 1:
        return None
    return (
        "moe_all_to_all has the host read how many rows go where, so that steps are not captured in CUDA graphs; and "
        "since every GPU has every token after attention, what it sends comes on top of the sum over all GPUs"
    )


def _note_unsolved(case: Case) -> str | None:
    q = case.quantize
    if not q.recipe.auto:
        return None
    return (
        f"the recipe is solved when quantize runs; until then sizes are counted as if every linear became {q.method} "
        f"in groups of {q.group_size} (`trtseek recipe` writes a recipe that is counted)"
    )


def _note_idle_budget(case: Case) -> str | None:
    if case.quantize.budget is None or case.quantize.recipe.auto:
        return None
    place = case.config.locate("stages.quantize.budget")
    return f"{place} is for `trtseek recipe` and for recipe: auto: what runs here does not read it"


def _note_idle_rows(case: Case) -> str | None:
    idle = case.quantize.rules.idle_rows(case.kinds) if case.quantize.recipe.rows else ()
    if not idle:
        return None
    return f"{', '.join(idle)} decides nothing: what it names is excluded, or named by a row before it"


def _note_ranks(case: Case) -> str | None:
    p = case.parallel
    if p.tensor * p.pipeline == 1 or case.config.target.world.foreign:
        return None
    text = f"an engine for each of {p.tensor * p.pipeline} GPUs, of one host; none has run on GPUs yet"
    if p.pipeline > 1:
        text += ", and those of pipeline stages are served on the CPU alone"
    return text


NOTES: tuple[Rule, ...] = (
    Rule("an_engine_each", "target.parallel", _note_ranks, ""),
    Rule("backend_of_gpu", "target.backend", _note_backend, ""),
    Rule("weights_come_later", "stages.build.weights", _note_stripped, ""),
    Rule("fp8_saves_memory", "stages.convert.dtype", _note_fp8_blocks, ""),
    Rule("made_blocks_save_memory", "stages.quantize.method", _note_made_blocks, ""),
    Rule("cache_scales_unread", "stages.quantize.kv_cache", _note_unread_scales, ""),
    Rule("plugins_are_new", "stages.build.lowering", _note_plugins, ""),
    Rule("no_experts", "stages.build.lowering.moe_experts", _note_no_experts, ""),
    Rule("nothing_to_exchange", "stages.build.lowering.moe_all_to_all", _note_lone_exchange, ""),
    Rule("exchange_has_a_price", "stages.build.lowering.moe_all_to_all", _note_exchange, ""),
    Rule("recipe_comes_later", "stages.quantize.recipe", _note_unsolved, ""),
    Rule("idle_budget", "stages.quantize.budget", _note_idle_budget, ""),
    Rule("idle_rows", "stages.quantize.recipe", _note_idle_rows, ""),
    Rule("smaller_groups", "stages.quantize.group_size", _note_smaller_groups, ""),
)
