"""Refuses, before any work, what model, target and settings cannot do together. The rules: `rules.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pipeline.config.case import NOTHING, Case
from pipeline.config.foreign_rules import FOREIGN_RULES
from pipeline.config.notes import NOTES
from pipeline.config.parallel_rules import PARALLEL_RULES
from pipeline.config.recipe_rules import RECIPE_RULES
from pipeline.config.rules import RULES, Rule
from pipeline.config.tensorrt_llm_build_rules import TENSORRT_LLM_BUILD_RULES
from pipeline.config.tensorrt_llm_rules import TENSORRT_LLM_RULES
from pipeline.config.tensorrt_llm_serving_rules import TENSORRT_LLM_SERVING_RULES
from pipeline.errors import CompatibilityError

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.foreign.holding import Holding
    from pipeline.checkpoint.tensors import TensorInfo
    from pipeline.config.schema import Config


# Most ways out name a method or a group size, which a model that is quantized already has.
AGAIN = (
    "this model is quantized already: another method or group size means to quantize its 16-bit weights, or to take "
    "another quantization of it"
)
ALL_RULES: tuple[Rule, ...] = (
    *RULES,
    *PARALLEL_RULES,
    *FOREIGN_RULES,
    *RECIPE_RULES,
    *TENSORRT_LLM_RULES,
    *TENSORRT_LLM_BUILD_RULES,
    *TENSORRT_LLM_SERVING_RULES,
)
# Of them, those about quantizing alone, whatever is built of it.
QUANTIZE_RULES = (
    "exclude_matches",
    "something_to_quantize",
    "recipe_quantizes",
    "group_divides_something",
    "recipe_matches",
    "calibration_within_context",
)


def check_compatibility(
    config: Config, architecture: Architecture, tensors: Mapping[str, TensorInfo], holding: Holding = NOTHING
) -> tuple[str, ...]:
    """What a user must know about a combination that works, one sentence each; for `validate` and `plan` to show.

    `tensors` are the source checkpoint's headers, `holding` of its quantized linears. Raises CompatibilityError: each
    broken rule's reason and way out.
    """
    case = Case(config=config, architecture=architecture, tensors=tensors, holding=holding)
    _refuse(ALL_RULES, case)
    notes = (rule.find(case) for rule in NOTES)
    return tuple(note for note in notes if note)


def check_quantize(config: Config, architecture: Architecture) -> None:
    """Refuses what `stages.quantize` cannot do with a model (CompatibilityError), for what no engine is built of."""
    case = Case(config=config, architecture=architecture, tensors={})
    _refuse((rule for rule in ALL_RULES if rule.name in QUANTIZE_RULES), case)


def _refuse(rules: Iterable[Rule], case: Case) -> None:
    broken = [(rule, problem) for rule in rules if (problem := rule.find(case))]
    if not broken:
        return
    message = "\n".join(f"{rule.locate(case)}: {problem}" for rule, problem in broken)
    ways_out = [*dict.fromkeys(rule.way_out for rule, _ in broken), *([AGAIN] if case.holding else [])]
    raise CompatibilityError(message, hint="; ".join(ways_out))
