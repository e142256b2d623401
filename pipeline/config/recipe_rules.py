"""The compatibility rules of recipes and budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.checkpoint.tensors import MODEL_DTYPE_BYTES
from pipeline.config.case import Case
from pipeline.config.expert_rules import EXPERT_FORMATS
from pipeline.config.format_rules import FP8_FORMATS
from pipeline.config.rules import Rule
from pipeline.quantization.catalog import FORMATS, NONE
from pipeline.quantization.options import Candidate, list_candidates
from pipeline.quantization.patterns import find_pattern
from pipeline.quantization.rules import HEAD_HINT, find_unfit_head
from pipeline.quantization.selection import HEAD, HEAD_NAME, Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.config.schema import Config
    from pipeline.quantization.options import Goal

BUDGET_HINT = "raise the budget, or allow smaller formats (stages.quantize.sensitivity.formats)"


def _find_unfit_head(case: Case) -> str | None:
    return find_unfit_head(case.quantize.rules, tied=case.architecture.tie_word_embeddings)


def _find_unmatched_rows(case: Case) -> str | None:
    def names_head(pattern: str) -> bool:  # of a tied one, another rule says more
        return find_pattern((pattern,))(HEAD_NAME) is not None

    rows = case.quantize.recipe.rows
    unused = [row.pattern for row in rows if not (case.matches(row.pattern) or names_head(row.pattern))]
    return f"{', '.join(unused)} matches no linear of the model" if unused else None


def _find_idle_recipe(case: Case) -> str | None:
    if not case.quantize.recipe.rows or not case.is_quantized or case.chosen:
        return None
    return "no linear is left to quantize: those that include names stay in 16 bits by its rows or by exclude"


def _find_no_budget(case: Case) -> str | None:
    return "auto has nothing to solve for" if case.quantize.recipe.auto and case.quantize.budget is None else None


def _find_no_base(case: Case) -> str | None:
    is_none = case.quantize.recipe.auto and case.quantize.method == NONE
    return "auto quantizes by stages.quantize.method, which is none" if is_none else None


def _find_two_recipes(case: Case) -> str | None:
    recipe = case.quantize.recipe
    return "auto solves for the rows, and there are rows" if recipe.auto and recipe.rows else None


def _find_impossible_budget(case: Case) -> str | None:
    budget = case.quantize.budget
    return explain_impossible(case, budget.goal) if case.quantize.recipe.auto and budget is not None else None


def explain_impossible(case: Case, goal: Goal) -> str | None:
    """Why no recipe meets a goal of size, by the weights and scales of the smallest formats, without what solving adds:
    vectors, tensors that stay. None where one may."""
    q = case.quantize
    if goal.kind == "kl":
        return None
    candidates = list_candidates(q.rules, offered_formats(case.config), search=q.sensitivity.search)
    rules, width = replace(q.rules, recipe=()), MODEL_DTYPE_BYTES[case.dtype]
    least = weights = 0
    for kind in case.kinds:
        if kind.first.role != HEAD:
            shape = kind.first.target_shape
            count = sum(n for decision, n in rules.count(kind).items() if isinstance(decision, Decision))
            weights += count * shape[0] * shape[1]
            least += count * _count_least(shape, candidates, width)
    possible = least / max(weights, 1) * (8 if goal.kind == "bits_per_weight" else 1 / width)
    if goal.limit >= possible:
        return None
    return f"{goal.kind}: {goal.limit:g} cannot be met: the smallest formats make {possible:.4g} of the linears alone"


def _count_least(shape: Sequence[int], candidates: Sequence[Candidate], width: int) -> int:
    fits = (candidate.fit(shape) for candidate in candidates)
    sizes = (FORMATS[each.format].nbytes(shape, each.group) for each in fits if isinstance(each, Decision))
    return min(sizes, default=shape[0] * shape[1] * width)


def _find_fp8_choice(case: Case) -> str | None:
    q = case.quantize
    wanted = [name for name in q.sensitivity.formats if name in FP8_FORMATS] if q.recipe.auto else []
    if not wanted or case.gpu.has("fp8"):
        return None
    return f"{wanted[0]} needs FP8 tensor cores, SM89 or later; the {case.gpu.name} is SM{case.gpu.sm}"


def offered_formats(config: Config) -> tuple[str, ...]:
    """What recipe: auto chooses from, beside 16 bits."""
    named = config.stages.quantize.sensitivity.formats
    blocks = ("fp8_blocks",) if config.target.device.has("fp8") else ()
    return named or ("int4", "int8", *blocks)


def offered_to_experts(config: Config) -> frozenset[str]:
    """Of these, what routed experts may become: their inputs are not rounded."""
    return frozenset(name for name in offered_formats(config) if not FORMATS[name].static_inputs)


def _find_choice_without_kernel(case: Case) -> str | None:
    q = case.quantize
    is_asked = case.build.lowering.moe_experts == "plugin" and case.architecture.experts is not None
    if not is_asked or not q.recipe.auto or "experts" not in q.include:
        return None
    unknown = ", ".join(sorted(offered_to_experts(case.config) - EXPERT_FORMATS))
    return f"auto may choose {unknown}, which the plugin moe_experts has no kernel for" if unknown else None


RECIPE_RULES: tuple[Rule, ...] = (
    Rule("head_is_fit", "stages.quantize", _find_unfit_head, HEAD_HINT),
    Rule("recipe_matches", "stages.quantize.recipe", _find_unmatched_rows, "a name: transformer.layers.0.mlp.fc"),
    Rule(
        "recipe_quantizes",
        "stages.quantize.recipe",
        _find_idle_recipe,
        "give a row another method than none, or leave the recipe out and set stages.quantize.method: none",
    ),
    Rule("auto_has_budget", "stages.quantize.recipe", _find_no_budget, "set stages.quantize.budget: {size_ratio: 0.4}"),
    Rule("budget_is_possible", "stages.quantize.budget", _find_impossible_budget, BUDGET_HINT),
    Rule("auto_has_method", "stages.quantize.recipe", _find_no_base, "set stages.quantize.method: awq"),
    Rule("auto_or_rows", "stages.quantize.recipe", _find_two_recipes, "write auto, or the rows"),
    Rule(
        "choices_have_kernels",
        "stages.quantize.sensitivity.formats",
        _find_choice_without_kernel,
        "name int4, or set stages.build.lowering.moe_experts: native",
    ),
    Rule("choices_fit_gpu", "stages.quantize.sensitivity.formats", _find_fp8_choice, "name int4 and int8"),
)
