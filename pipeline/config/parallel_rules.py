"""The compatibility rules of parallel sizes: what several GPUs cannot share out evenly, and sizes that would work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts import list_kinds
from pipeline.config.case import FP8_TYPES, Case
from pipeline.config.rules import Rule
from pipeline.engine.tensorrt_llm.rank_sizes import share_out
from pipeline.quantization.catalog import FP8_BLOCKS, GROUP_SIZES
from pipeline.quantization.selection import Decision
from pipeline.sharding.divisions import Division, divisions, tell_undivided
from pipeline.sharding.ranks import Parallel, list_divisors
from pipeline.sharding.spreading import Spreading

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture


def _find_expert_beyond_tensor(case: Case) -> str | None:
    tensor, expert = case.parallel.tensor, case.parallel.expert
    if tensor % expert == 0:
        return None
    return (
        f"expert parallel size {expert} does not divide tensor parallel size {tensor}: experts are spread over the "
        f"tensor group; expert sizes that would work: {', '.join(map(str, list_divisors(tensor)))}"
    )


def _find_few_layers(case: Case) -> str | None:
    stages, layers = case.parallel.pipeline, case.architecture.num_layers
    if stages <= layers:
        return None
    return f"pipeline parallel size {stages} is more than the model's {layers} decoder layers"


def _find_uneven(case: Case) -> str | None:
    """Hints at sizes that cut nothing either."""
    return _find(case, divisions(_shape(case)), also=_stored(case))


def _find_cut(case: Case) -> str | None:
    """Groups, blocks and pairs of the linears as they will be stored, where all else divides."""
    even = divisions(_shape(case))
    if _find(case, even) is not None or (problem := _find(case, _stored(case), also=even)) is None:
        return None
    groups = [str(size) for size in GROUP_SIZES if _find(case, _stored(case, size), also=even) is None]
    return f"{problem}; group sizes that would work: {', '.join(groups)}" if groups else problem


def _stored(case: Case, largest: int = max(GROUP_SIZES)) -> list[Division]:
    """What the linears ask as they are stored, those that quantization makes in groups of `largest` at most."""
    asked: list[Division] = []
    spreading = Spreading(case.architecture)
    for linear in case.chosen:
        if isinstance(linear.decision, Decision):
            group = min(linear.group or 0, largest)
            asked += spreading.linear_divisions(linear.name, linear.decision.format, group)
    for kind in list_kinds(case.architecture) if case.held else ():
        for held in filter(None, case.held_kinds.get(kind.first.target, ())):
            asked += spreading.linear_divisions(kind.first.target.removesuffix(".weight"), held.format, held.group or 0)
    if case.kept_fp8 is not None:
        for kind in list_kinds(case.architecture):
            stored = case.tensors.get(kind.first.sources[0])
            if stored is not None and stored.dtype in FP8_TYPES and kind.first.role != "mtp":
                asked += spreading.linear_divisions(kind.first.target.removesuffix(".weight"), FP8_BLOCKS)
    return asked


def _find(case: Case, asked: list[Division], also: Sequence[Division] = ()) -> str | None:
    if case.parallel.tensor % case.parallel.expert:
        return None  # said already
    return tell_undivided(case.parallel.sizes, asked, also)


def _shape(case: Case) -> Architecture:
    """TensorRT-LLM gives a key/value head to several ranks, and fills the vocabulary up."""
    if not case.config.target.world.foreign:
        return case.architecture
    return share_out(case.architecture, Parallel(case.parallel.tensor))


PARALLEL_RULES: tuple[Rule, ...] = (
    Rule(
        "expert_divides_tensor",
        "target.parallel.expert",
        _find_expert_beyond_tensor,
        "two-way expert parallelism alone is tensor: 2, expert: 2",
    ),
    Rule("stages_have_layers", "target.parallel.pipeline", _find_few_layers, "take a smaller pipeline size"),
    Rule("ranks_are_even", "target.parallel", _find_uneven, "take parallel sizes that divide the model"),
    Rule(
        "nothing_is_cut",
        "target.parallel.tensor",
        _find_cut,
        "take other parallel sizes or a smaller group_size, or leave that linear out of quantization",
    ),
)
