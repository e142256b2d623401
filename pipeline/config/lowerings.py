"""Which operations are plugins where a config says nothing: those whose kernels have passed on the target's SM, and
take what the checkpoint will hold. What a config says is not changed: `validate` refuses it where it cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config.expert_rules import DOWN, EXPERT_FORMATS, UP, judge, list_held, list_made
from pipeline.config.recipe_rules import offered_to_experts
from pipeline.errors import TrtseekError

if TYPE_CHECKING:
    from pipeline.checkpoint.foreign.holding import Holding
    from pipeline.config.schema import Config

EXCHANGE = "moe_all_to_all"  # has nothing to do without expert parallelism
EXPERTS = "moe_experts"
LAYERS = range(128)  # more than any model has, whose architecture is not known yet
SHAPES = dict.fromkeys((*UP, *DOWN), (128, 128))  # likewise: what takes any format


def choose_lowerings(config: Config, holding: Holding | None = None) -> Config:
    """The config with the lowerings that it leaves out and that are not native. `model_fields_set` of its `lowering`
    still holds those alone that it says. `holding`: of what another tool has quantized; None: to be looked up."""
    from plugins.passed import list_passed

    if config.target.world.foreign:
        return config
    stages = config.stages
    said = stages.build.lowering
    passed = set(list_passed(config.target.device.sm)) - said.model_fields_set
    if config.target.parallel.expert == 1:
        passed.discard(EXCHANGE)
    if EXPERTS in passed and not _experts_have_kernels(config, holding):
        passed.discard(EXPERTS)
    values = said.model_dump() | dict.fromkeys(passed, "plugin")
    lowering = type(said).model_construct(set(said.model_fields_set), **values)
    build = stages.build.model_copy(update={"lowering": lowering})
    return config.model_copy(update={"stages": stages.model_copy(update={"build": build})})


def _experts_have_kernels(config: Config, holding: Holding | None) -> bool:
    """Whatever the routed experts may become, or are already."""
    quantize = config.stages.quantize
    if judge(list_made(quantize.rules, LAYERS, SHAPES)) is not None:
        return False
    if quantize.recipe.auto and not offered_to_experts(config) <= EXPERT_FORMATS:
        return False
    if holding is None:
        holding = {} if quantize.applies else _read_holding(config)
    return judge(list_held(holding)) is None


def _read_holding(config: Config) -> Holding:
    """Of the source as it lies there; nothing of one that cannot be read, which whoever needs it will say."""
    from pipeline.checkpoint.architecture import parse_architecture
    from pipeline.checkpoint.foreign.methods import name_method
    from pipeline.checkpoint.shard_index import CONFIG
    from pipeline.checkpoint.strict_json import read_json

    path = config.model.path
    try:
        stated = read_json(path / CONFIG)
        if name_method(path, stated) is None or parse_architecture(stated).experts is None:
            return {}
        return config.read_headers().holding
    except (TrtseekError, OSError):
        return {}
