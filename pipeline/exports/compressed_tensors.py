"""compressed-tensors, the format of llm-compressor and vLLM, which transformers loads with the library of that name.

    of ours     format            tensors of a linear [O, I]
    int4        pack-quantized    weight_packed I32 [O, I/8], weight_scale [O, I/g] as the model, weight_shape I64 [2]
    int8        pack-quantized    weight_packed I32 [O, I/4], weight_scale F32 [O, 1], weight_shape I64 [2]
    int8_sq     int-quantized     weight I8 [O, I], weight_scale F32 [O, 1], input_scale F32 [1]
    fp8         float-quantized   weight F8_E4M3 [O, I], weight_scale F32 [1], input_scale F32 [1]
    fp8_rows    float-quantized   weight F8_E4M3 [O, I], weight_scale F32 [O, 1], input_scale F32 [1] where there is one
    fp8_blocks  float-quantized   weight F8_E4M3 [O, I], weight_scale F32 [O/128, I/128] rounded up

INT8 weights alone are packed because vLLM reads weight-only integers so, and no other way. FP8 blocks come without a
scheme for inputs: what was proved keeps them in 16 bits. Schemes that differ become groups of config_groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.layouts.scales import BLOCK, FP8, INT8, count_blocks
from pipeline.checkpoint.tensors import DTYPES, TensorInfo
from pipeline.errors import CheckpointError
from pipeline.exports.names import make_patterns
from pipeline.exports.plan import Encoding
from pipeline.exports.refusals import refuse_cut_blocks, refuse_prescaled
from pipeline.quantization.words import PER_WORD, ZERO, pack_words

if TYPE_CHECKING:
    import torch

    from pipeline.exports.linear import Numbers, Part, QuantizedLinear
    from pipeline.exports.plan import Kept, Plan

MIXED = "mixed-precision"
_CHANNEL = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel", "dynamic": False}
_TENSOR = {"num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A row of config_groups: the format, and QuantizationArgs of weights, and of inputs where these have a scale."""

    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None


SCHEMES: Mapping[str, Scheme] = {
    "int4": Scheme(
        format="pack-quantized",
        weights={"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "dynamic": False},
    ),
    "int8": Scheme(format="pack-quantized", weights=_CHANNEL),
    "int8_sq": Scheme(format="int-quantized", weights=_CHANNEL, inputs={"type": "int", **_TENSOR}),
    "fp8": Scheme(format="float-quantized", weights={"type": "float", **_TENSOR}, inputs={"type": "float", **_TENSOR}),
    "fp8_rows": Scheme(
        format="float-quantized",
        weights={**_CHANNEL, "type": "float"},
        inputs={"type": "float", **_TENSOR},
    ),
    "fp8_blocks": Scheme(
        format="float-quantized",
        weights={
            "type": "float",
            "num_bits": 8,
            "symmetric": True,
            "strategy": "block",
            "block_structure": [BLOCK, BLOCK],
            "dynamic": False,
        },
    ),
}


def _describe_int4(linear: QuantizedLinear, part: Part, dtype: str) -> list[TensorInfo]:
    rows, columns = part.shape
    return [
        TensorInfo(f"{part.name}.weight_packed", "I32", (rows, columns // PER_WORD)),
        TensorInfo(f"{part.name}.weight_scale", dtype, (rows, columns // (linear.group or columns))),
        TensorInfo(f"{part.name}.weight_shape", "I64", (2,)),
    ]


def _encode_int4(numbers: Numbers, dtype: str) -> list[torch.Tensor]:
    scales = numbers.scales.to(_torch_type(dtype))
    if not scales.float().equal(numbers.scales):
        raise CheckpointError(
            f"INT4 scales are no {DTYPES[dtype][1]}, the model's type, in which the quantize stage makes them",
            hint="quantize again, from a checkpoint of that type",
        )
    return [pack_words(numbers.q + ZERO), scales, _shape(numbers)]


def _describe_int8(linear: QuantizedLinear, part: Part, dtype: str) -> list[TensorInfo]:
    rows, columns = part.shape
    return [
        TensorInfo(f"{part.name}.weight_packed", "I32", (rows, columns // 4)),
        TensorInfo(f"{part.name}.weight_scale", "F32", (rows, 1)),
        TensorInfo(f"{part.name}.weight_shape", "I64", (2,)),
    ]


def _encode_int8(numbers: Numbers, dtype: str) -> list[torch.Tensor]:
    import torch

    unsigned = (numbers.q.short() + 128).to(torch.uint8)  # four to a word, the first in the lowest byte
    return [unsigned.view(torch.int32), numbers.scales[:, None], _shape(numbers)]


def _refuse_int8(linear: QuantizedLinear) -> str | None:
    return "its inputs are no multiple of 4" if linear.mapping.target_shape[1] % 4 else None


def _describe_plain(linear: QuantizedLinear, part: Part, dtype: str) -> list[TensorInfo]:
    """Eight-bit numbers as they are, with the scales that the format's row names."""
    stored = INT8 if linear.format == "int8_sq" else FP8
    scales = {"fp8": (1,), "fp8_blocks": count_blocks(part.shape)}.get(linear.format, (part.shape[0], 1))
    infos = [
        TensorInfo(f"{part.name}.weight", stored, part.shape),
        TensorInfo(f"{part.name}.weight_scale", "F32", scales),
    ]
    if linear.is_static:
        infos.append(TensorInfo(f"{part.name}.input_scale", "F32", (1,)))
    return infos


def _encode_plain(numbers: Numbers, dtype: str) -> list[torch.Tensor]:
    scales = numbers.scales[:, None] if numbers.format in ("int8_sq", "fp8_rows") else numbers.scales
    return [numbers.q, scales, *([] if numbers.inputs is None else [numbers.inputs])]


ENCODINGS: Mapping[str, Encoding] = {
    "int4": Encoding(describe=_describe_int4, encode=_encode_int4, refuse=refuse_prescaled),
    "int8": Encoding(describe=_describe_int8, encode=_encode_int8, refuse=_refuse_int8),
    "int8_sq": Encoding(describe=_describe_plain, encode=_encode_plain, refuse=refuse_prescaled),
    "fp8": Encoding(describe=_describe_plain, encode=_encode_plain),
    "fp8_rows": Encoding(describe=_describe_plain, encode=_encode_plain),
    "fp8_blocks": Encoding(describe=_describe_plain, encode=_encode_plain, refuse=refuse_cut_blocks),
}


def describe(plan: Plan) -> dict[str, Any] | None:
    """quantization_config: a group of config_groups for each scheme and group size."""
    if not plan.kept:
        return None
    every = [*plan.kept, *plan.wide_linears]
    members: dict[Kept, list[str]] = defaultdict(list)
    for name, kept in plan.kept.items():
        members[kept].append(name)
    groups = {}
    for index, (kept, names) in enumerate(members.items()):
        scheme = SCHEMES[kept.format]
        groups[f"group_{index}"] = {
            "targets": [f"re:{pattern}$" for pattern in make_patterns(names, every)],
            "weights": {**scheme.weights, **({"group_size": kept.group} if kept.group else {})},
            "input_activations": scheme.inputs if kept.static else None,
            "output_activations": None,
            "format": scheme.format,
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [name if "\\" not in name else f"re:{name}$" for name in make_patterns(plan.wide_linears, every)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _shape(numbers: Numbers) -> torch.Tensor:
    import torch

    return torch.tensor(numbers.q.shape, dtype=torch.int64)


def _torch_type(dtype: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, DTYPES[dtype][1])
    return found
