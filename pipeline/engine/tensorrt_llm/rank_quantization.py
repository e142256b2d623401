"""How TensorRT-LLM is told what is quantized: `quantization` of config.json, and quant_cfg.json of mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.layouts.scales import PRESCALE, WEIGHT_SCALES, find_format
from pipeline.engine.tensorrt_llm.ask import StoredLinear
from pipeline.quantization.catalog import FORMATS, MIXED
from pipeline.quantization.selection import QUANTIZABLE

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorInfo

# What TensorRT-LLM leaves out where config.json names nothing; a list in its place must name these too.
ALWAYS_EXCLUDED = (
    "*lm_head",
    "*router",
    "*vocab_embedding",
    "*position_embedding",
    "*block_embedding",
    "*shared_expert_gate",
)
GPTQ = "W4A16_GPTQ"
# quantization.method of an engine checkpoint whose INT4 weights have no scale of their inputs.
GPTQ_METHODS = ("gptq",)
AWQ_KEYS: dict[str, Any] = {"has_zero_point": False, "pre_quant_scale": True}
GPTQ_KEYS: dict[str, Any] = {"has_zero_point": True, "pre_quant_scale": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankQuantization:
    """`algo`: TensorRT-LLM's name of the whole, None in 16 bits. `config` and `layers` as config.json and
    quant_cfg.json have them, the latter empty unless `algo` is MIXED_PRECISION."""

    algo: str | None
    config: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, Any]]

    @property
    def is_gptq(self) -> bool:
        """Whether INT4 weights are stored as the kernels read them."""
        return self.algo == GPTQ

    @property
    def quant_cfg(self) -> dict[str, Any] | None:
        """quant_cfg.json."""
        if self.algo != MIXED:
            return None
        cache = self.config["kv_cache_quant_algo"]
        return {"quant_algo": MIXED, "kv_cache_quant_algo": cache, "quantized_layers": dict(self.layers)}


def list_linears(architecture: Architecture, tensors: Mapping[str, TensorInfo]) -> tuple[StoredLinear, ...]:
    """The decoder's linears as an engine checkpoint stores them."""
    found = []
    for mapping in layout_for(architecture).mappings():
        name, _, kind = mapping.target.rpartition(".")
        if (
            kind != "weight"
            or mapping.layer is None
            or mapping.role not in QUANTIZABLE
            or name + ".weight" not in tensors
        ):
            continue
        form, group = find_format(tensors, name), None
        if form in FORMATS and FORMATS[form].grouped:
            group = mapping.target_shape[1] // tensors[f"{name}.{WEIGHT_SCALES}"].shape[1]
        rows, columns = mapping.target_shape
        found.append(
            StoredLinear(
                name=name, out_features=rows, in_features=columns, expert=mapping.expert, format=form, group=group
            )
        )
    return tuple(found)


def describe_quantization(
    linears: Sequence[StoredLinear],
    tensors: Mapping[str, TensorInfo],
    local: Callable[[int], int],
    *,
    method: str | None,
    cache: str | None,
) -> RankQuantization:
    """`method` and `cache`: the engine checkpoint's quantization.method and kv_cache_quant_algo. `local`: a layer's
    number in its pipeline stage, by which TensorRT-LLM names it."""
    formats = {(linear.format, linear.group) for linear in linears if linear.format}
    if not formats:
        return RankQuantization(algo=None, config={"quant_algo": None, "kv_cache_quant_algo": cache}, layers={})
    has_prescale = any(f"{linear.name}.{PRESCALE}" in tensors for linear in linears)
    gptq = method in GPTQ_METHODS and not has_prescale
    rows = {entry: _describe_format(*entry, gptq=gptq and len(formats) == 1) for entry in formats}
    if len(formats) > 1:
        layers = {_name_module(linear, local): rows[linear.format, linear.group] for linear in linears if linear.format}
        return RankQuantization(
            algo=MIXED, config={"quant_algo": MIXED, "kv_cache_quant_algo": cache}, layers=dict(sorted(layers.items()))
        )
    ((form, group),) = formats
    row = rows[form, group]
    plain = [_name_module(linear, local) for linear in linears if linear.format is None]
    return RankQuantization(
        algo=row["quant_algo"],
        config={**row, "kv_cache_quant_algo": cache, "exclude_modules": [*ALWAYS_EXCLUDED, *dict.fromkeys(plain)]},
        layers={},
    )


def _describe_format(form: str, group: int | None, *, gptq: bool) -> dict[str, Any]:
    algo = FORMATS[form].quant_algo
    if group is None:
        return {"quant_algo": algo}
    if gptq:
        return {"quant_algo": GPTQ, "group_size": group, **GPTQ_KEYS}
    return {"quant_algo": algo, "group_size": group, **AWQ_KEYS}


def _name_module(linear: StoredLinear, local: Callable[[int], int]) -> str:
    """Experts are one module, their layer's `mlp`."""
    layer, name = linear.place
    return f"transformer.layers.{local(layer)}.{name if linear.expert is None else 'mlp'}"
