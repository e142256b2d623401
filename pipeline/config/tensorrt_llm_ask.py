"""What a config asks of TensorRT-LLM's engines: the model, and each linear as it will be stored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.engine.tensorrt_llm.ask import Ask, StoredLinear
from pipeline.quantization.catalog import FP8_BLOCKS
from pipeline.quantization.selection import HEAD

if TYPE_CHECKING:
    from pipeline.config.case import Case


def make_ask(case: Case) -> Ask:
    """What TensorRT-LLM would be asked to run."""
    return Ask(
        architecture=case.architecture,
        linears=tuple(_list_linears(case)),
        dtype=case.dtype,
        parallel=case.parallel.sizes,
        sm=case.gpu.sm,
        head=case.head_format,
    )


def _list_linears(case: Case) -> list[StoredLinear]:
    """As `quantize` will store them; where it leaves all as they are, they stay as they were quantized before, and
    DeepSeek's FP8 in blocks."""
    rules, kept = case.quantize.rules, FP8_BLOCKS if case.kept_fp8 else None
    found = []
    for kind in (kind for kind in case.kinds if kind.first.role != HEAD):
        first, (rows, columns) = kind.first, kind.first.target_shape
        # A model with latent attention is refused whatever its linears are, and V3 has 45,000 of them.
        names = kind.names() if case.architecture.latent is None else (first.target,)
        for index, name in enumerate(names):
            decision = case.held.get(name) or rules.decide(name, first.role, (rows, columns))
            linear = StoredLinear(
                name=name.removesuffix(".weight"),
                out_features=rows,
                in_features=columns,
                expert=None if first.expert is None else index % kind.experts,
                format=kept,
            )
            if not isinstance(decision, str):
                linear = replace(linear, format=decision.format, group=decision.group)
            found.append(linear)
    return found
