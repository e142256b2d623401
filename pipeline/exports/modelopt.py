"""nvidia-modelopt's unified Hugging Face checkpoints, which TensorRT-LLM's PyTorch backend (1.3 and later) loads.

    of ours   quant_algo    tensors of a linear [O, I]
    int4      W4A16_AWQ     weight U8 [O/2, I] (row 2r in the low nibble, 2r + 1 in the high one, as in ours),
                            weight_scale F32 [O, I/g], pre_quant_scale [I] in the model's type where there is one
    int4_fp8  W4A8_AWQ      the same, and F32 [] input_scale and weight_scale_2, by which a reader divides weight_scale
    fp8       FP8           weight F8_E4M3 [O, I], weight_scale F32 [], input_scale F32 []
    fp8_rows  FP8           the same, where each of the hub's linears has one scale of its own

The step of a layer's FP8 cache is k_proj.k_scale and v_proj.v_scale, F32 []: ours is one, of both.
hf_quant_config.json names the algorithm and what is left out; of more than one, MIXED_PRECISION, with each linear's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.layouts.scales import FP8
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.exports.plan import Encoding
from pipeline.exports.refusals import NO_STEP, PER_OUTPUT, refuse_head
from pipeline.quantization.catalog import FORMATS as ROWS
from pipeline.quantization.catalog import MIXED

if TYPE_CHECKING:
    import torch

    from pipeline.exports.linear import Numbers, Part, QuantizedLinear
    from pipeline.exports.plan import Kept, Plan

FILE = "hf_quant_config.json"


def _describe_int4(linear: QuantizedLinear, part: Part, dtype: str) -> list[TensorInfo]:
    rows, columns = part.shape
    infos = [
        TensorInfo(f"{part.name}.weight", "U8", (rows // 2, columns)),
        TensorInfo(f"{part.name}.weight_scale", "F32", (rows, columns // (linear.group or columns))),
    ]
    if linear.is_prescaled:
        infos.append(TensorInfo(f"{part.name}.pre_quant_scale", dtype, (columns,)))
    if linear.format == "int4_fp8":
        infos += [TensorInfo(f"{part.name}.{kind}", "F32", ()) for kind in ("weight_scale_2", "input_scale")]
    return infos


def _encode_int4(numbers: Numbers, dtype: str) -> list[torch.Tensor]:
    import torch

    from pipeline.quantization.int4 import pack

    packed = pack(numbers.q.contiguous()).view(torch.uint8)
    steps = [each.reshape(()) for each in (numbers.second, numbers.inputs) if each is not None]
    return [packed, numbers.scales, *([] if numbers.prescale is None else [numbers.prescale]), *steps]


def _refuse_int4(linear: QuantizedLinear) -> str | None:
    if (reason := refuse_head(linear)) is not None:
        return reason
    return "its rows do not pack in pairs" if any(part.shape[0] % 2 for part in linear.parts) else None


def _describe_fp8(linear: QuantizedLinear, part: Part, dtype: str) -> list[TensorInfo]:
    scales = [TensorInfo(f"{part.name}.{kind}", "F32", ()) for kind in ("weight_scale", "input_scale")]
    return [TensorInfo(f"{part.name}.weight", FP8, part.shape), *scales]


def _encode_fp8(numbers: Numbers, dtype: str) -> list[torch.Tensor]:
    if numbers.inputs is None:
        raise ValueError("FP8 without a scale of its input")
    return [numbers.q, numbers.scales[0], numbers.inputs[0]]


def _refuse_fp8_rows(linear: QuantizedLinear) -> str | None:
    if not linear.is_static:
        return NO_STEP
    scales = linear.read_scales()
    if any(bool((scales[part.rows] != scales[part.rows.start]).any()) for part in linear.parts):
        return PER_OUTPUT
    return None


ENCODINGS: Mapping[str, Encoding] = {
    "int4": Encoding(describe=_describe_int4, encode=_encode_int4, refuse=_refuse_int4),
    "int4_fp8": Encoding(describe=_describe_int4, encode=_encode_int4, refuse=_refuse_int4),
    "fp8": Encoding(describe=_describe_fp8, encode=_encode_fp8),
    "fp8_rows": Encoding(describe=_describe_fp8, encode=_encode_fp8, refuse=_refuse_fp8_rows),
}


def name_cache_scales(layer: int) -> tuple[str, str]:
    """Of keys and of values."""
    base = f"model.layers.{layer}.self_attn"
    return f"{base}.k_proj.k_scale", f"{base}.v_proj.v_scale"


def describe(plan: Plan) -> dict[str, Any] | None:
    """quantization_config of config.json: the same as in the file, and whose it is."""
    return {"quant_method": "modelopt", **_describe(plan)} if plan.kept else None


def list_files(plan: Plan) -> Mapping[str, Mapping[str, Any]]:
    producer = {"name": "modelopt", "version": "0.47.0"}  # the layout's, which readers may ask for
    return {FILE: {"producer": producer, "quantization": _describe(plan)}} if plan.kept else {}


def _describe(plan: Plan) -> dict[str, Any]:
    layers = {name: _name(kept) for name, kept in plan.kept.items()}
    first = next(iter(layers.values()))
    routers = [name for name, role in plan.plain.items() if role == "router"]
    document: dict[str, Any] = {"quant_algo": MIXED, "kv_cache_quant_algo": plan.cache_algo}
    document |= first if all(each == first for each in layers.values()) else {"quantized_layers": layers}
    return {**document, "exclude_modules": sorted([*plan.wide_linears, *routers])}


def _name(kept: Kept) -> dict[str, Any]:
    stored = "fp8" if kept.format == "fp8_rows" else kept.format
    row: dict[str, Any] = {"quant_algo": ROWS[stored].quant_algo}
    if kept.group:
        row |= {"group_size": kept.group, "has_zero_point": False, "pre_quant_scale": True}
    return row
