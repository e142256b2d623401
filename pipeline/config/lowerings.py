"""Which operations are plugins where a config says nothing: those whose kernels have passed on the target's SM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config.recipe_rules import offered_formats
from pipeline.config.rules import EXPERT_FORMATS
from pipeline.quantization.selection import Decision

if TYPE_CHECKING:
    from pipeline.config.schema import Config

EXCHANGE = "moe_all_to_all"  # has nothing to do without expert parallelism
EXPERTS = "moe_experts"
LAYERS = 128  # more than any model has, whose architecture is not known yet


def choose_lowerings(config: Config) -> Config:
    """The config with the lowerings that it leaves out and that are not native. `model_fields_set` of its `lowering`
    still holds those alone that it says."""
    from plugins.passed import list_passed

    if config.target.world.foreign:
        return config
    passed = set(list_passed(config.target.device.sm))
    if config.target.parallel.expert == 1:
        passed.discard(EXCHANGE)
    if EXPERTS in passed and not _experts_have_kernels(config):
        passed.discard(EXPERTS)
    stages = config.stages
    said = stages.build.lowering
    values = said.model_dump() | dict.fromkeys(passed - said.model_fields_set, "plugin")
    lowering = type(said).model_construct(set(said.model_fields_set), **values)
    build = stages.build.model_copy(update={"lowering": lowering})
    return config.model_copy(update={"stages": stages.model_copy(update={"build": build})})


def _experts_have_kernels(config: Config) -> bool:
    """Whatever the routed experts may become. A layer's share a format: the first stands for all."""
    quantize = config.stages.quantize
    names = (f"transformer.layers.{i}.mlp.experts.0.{name}" for i in range(LAYERS) for name in ("fc", "gate", "proj"))
    decisions = [quantize.rules.decide(name, "experts", (128, 128)) for name in names]
    formats = {decision.format for decision in decisions if isinstance(decision, Decision)}
    if quantize.recipe.auto:
        formats.update(offered_formats(config))
    return formats <= EXPERT_FORMATS
