"""Quantized checkpoints that are damaged, contradict themselves, or mean something that is not read: refused by file
and by key or tensor, with nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import CheckpointError, ConfigError
from pipeline.workspace import FolderWorkspace
from tests.checkpoint.foreign import writers
from tests.checkpoint.foreign.cases import write

LINEAR = "model.layers.1.mlp.down_proj"


def refuse(path: Path, *, foreign: str = "dequantize") -> str:
    """With the mode that refuses least, unless told."""
    output = path.with_name("engine")
    workspace = FolderWorkspace(output, journal=path.with_name("journal"))
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(CheckpointFolder.open(path), workspace, dtype=None, overflow="refuse", foreign=foreign)
    assert caught.value.hint
    assert not (output / "config.json").exists() and not (output / "conversion.json").exists()
    assert len(caught.value.message) < 500
    return caught.value.message


def cut(kind: str, *shape: int) -> Callable[[writers.Tensors], object]:
    """The tensor in another shape."""
    return lambda t: t.update({f"{LINEAR}.{kind}": torch.zeros(*shape, dtype=t[f"{LINEAR}.{kind}"].dtype)})


def cast(kind: str, dtype: torch.dtype) -> Callable[[writers.Tensors], object]:
    return lambda t: t.update({f"{LINEAR}.{kind}": t[f"{LINEAR}.{kind}"].to(dtype)})


def drop(kind: str) -> Callable[[writers.Tensors], object]:
    return lambda t: t.pop(f"{LINEAR}.{kind}")


def fill(kind: str, value: float) -> Callable[[writers.Tensors], object]:
    return lambda t: t[f"{LINEAR}.{kind}"].fill_(value)


DAMAGE: list[tuple[str, Callable[[writers.Tensors], object], list[str]]] = [
    ("awq", drop("scales"), ["down_proj.scales is missing"]),
    ("awq", drop("qzeros"), ["down_proj.qzeros is missing"]),
    ("awq", drop("qweight"), ["down_proj.weight is missing"]),
    ("awq", cut("scales", 4, 64), ["down_proj.scales has shape [4, 64]", "[4, 128]"]),
    ("awq", cut("qzeros", 2, 16), ["down_proj.qzeros has shape [2, 16]", "[4, 16]"]),
    ("awq", cut("qweight", 256, 17), ["down_proj.qzeros has shape [4, 16]", "[4, 17]"]),
    ("awq", cut("qweight", 256, 16, 1), ["down_proj.qweight has shape [256, 16, 1]; a matrix is expected"]),
    ("awq", cast("qweight", torch.int64), ["down_proj.qweight is I64; read is I32"]),
    ("awq", cast("scales", torch.float32), ["down_proj.scales is F32"]),
    ("awq", fill("scales", float("nan")), ["down_proj"]),
    ("awq", lambda t: t.update({f"{LINEAR}.bias": torch.ones(128)}), ["down_proj.bias"]),
    ("gptq", drop("g_idx"), []),
    ("gptq", cut("g_idx", 255), ["down_proj.g_idx has shape [255]"]),
    ("gptq", fill("g_idx", 4), ["down_proj.g_idx names groups beyond the 4"]),
    ("gptq", fill("g_idx", -1), ["down_proj.g_idx names groups beyond the 4"]),
    ("gptq", cut("qweight", 31, 128), ["group_size 64 does not divide the 248 inputs"]),
    ("modelopt-int4", drop("weight_scale"), ["down_proj.weight", "[64, 256]", "[128, 256]"]),
    ("modelopt-int4", cast("weight", torch.int8), ["down_proj.weight is I8; read is U8"]),
    ("modelopt-int4", cut("pre_quant_scale", 255), ["down_proj.pre_quant_scale has shape [255]"]),
    ("modelopt-fp8", drop("input_scale"), ["down_proj.input_scale is missing"]),
    ("modelopt-fp8", cut("weight_scale", 2), ["down_proj.weight_scale has shape [2]"]),
    ("modelopt-fp8", cast("weight", torch.bfloat16), ["down_proj.weight is BF16; read is F8_E4M3"]),
    ("modelopt-fp8", lambda t: t[f"{LINEAR}.weight"].view(torch.uint8).fill_(0x7F), ["down_proj.weight is NaN"]),
    ("compressed-int4", drop("weight_scale"), ["down_proj.weight is missing"]),
    ("compressed-int4", drop("weight_shape"), ["down_proj.weight_shape is missing"]),
    ("compressed-int4", fill("weight_shape", 2**62), ["[128, 32], weight_shape says"]),
    ("compressed-int4", fill("weight_shape", -1), ["down_proj.weight_packed has shape"]),
    ("compressed-int8-static", drop("input_scale"), ["down_proj.input_scale is missing"]),
    ("compressed-int8-static", fill("input_scale", float("inf")), ["down_proj"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "expected"), DAMAGE)
def test_damaged_tensors(
    name: str, damage: Callable[[writers.Tensors], object], expected: list[str], tmp_path: Path
) -> None:
    path = write(name, tmp_path)
    writers.edit(path, damage)
    if not expected:  # what was left out says nothing that is not known
        convert_checkpoint(
            CheckpointFolder.open(path),
            FolderWorkspace(tmp_path / "engine", journal=tmp_path / "journal"),
            dtype=None,
            overflow="refuse",
        )
        return
    message = refuse(path)
    assert all(text in message for text in expected), message


WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
LINEARS = {"targets": ["Linear"], "weights": WEIGHTS}
SETTINGS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("awq", {"bits": 3}, ["quantization_config.bits is 3; read are 4"]),
    ("awq", {"bits": True}, ["bits is True"]),
    ("awq", {"bits": 10**40}, ["bits is an integer of more than 30 digits"]),
    ("awq", {"version": "gemv"}, ["version is 'gemv'; read are gemm"]),
    ("awq", {"group_size": 0}, ["group_size must be -1 or a positive integer"]),
    ("awq", {"group_size": 100}, ["group_size 100 does not divide the 128 inputs of model.layers.0.self_attn.q_proj"]),
    ("awq", {"group_size": "64"}, ["group_size must be"]),
    ("awq", {"group_size": 32}, ["qzeros has shape", "asks for [4, 16]"]),
    ("gptq", {"bits": 2}, ["bits is 2; read are 4, 8"]),
    ("gptq", {"bits": 8}, ["qzeros has shape"]),
    ("gptq", {"checkpoint_format": "marlin"}, ["checkpoint_format is 'marlin'; read are gptq, gptq_v2"]),
    ("gptq", {"pack_dtype": "int64"}, ["pack_dtype is 'int64'"]),
    ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, ["dynamic gives linears settings of their own"]),
    ("compressed-int4", {"format": "nvfp4-pack-quantized", "config_groups": {"g": LINEARS}},
     ["format is 'nvfp4-pack-quantized'"]),
    ("compressed-int4", {"config_groups": None}, ["config_groups is missing"]),
    ("compressed-int4", {"config_groups": []}, ["config_groups must be a mapping"]),
    ("compressed-int4", {"config_groups": {"g": {"targets": ["re:.*mlp.*"], "weights": WEIGHTS}}},
     ["config_groups has no group for model.layers.0.self_attn.q_proj"]),
    ("compressed-int4", {"config_groups": {"g": {**LINEARS, "targets": ["re:*"]}}}, ["no regular expression"]),
    ("compressed-int4", {"config_groups": {"g": {**LINEARS, "targets": "Linear"}}}, ["targets must be a list"]),
    ("compressed-int4", {"config_groups": {"g": {"targets": ["Linear"], "weights": None}}}, ["quantizes no weights"]),
    ("compressed-int4", {"config_groups": {"g": {"targets": ["Linear"], "weights": {**WEIGHTS, "num_bits": 3}}}},
     ["config_groups.g.weights.num_bits is 3"]),
    ("compressed-int4", {"config_groups": {"g": {"targets": ["Linear"], "weights": {**WEIGHTS, "type": "float"}}}},
     ["weights.type is 'float'"]),
    ("compressed-int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config.format is 'sparse-24"]),
    ("compressed-int4", {"transform_config": {"config_groups": {"u": {}}}}, ["transform_config turns weights"]),
    ("compressed-int4", {"quantization_status": "frozen"}, ["quantization_status is 'frozen'"]),
    ("compressed-int4", {"quant_method": "bitsandbytes"}, ["quantized (bitsandbytes)"]),
    ("compressed-int4", {"quant_method": ["awq"]}, ["quantized"]),
    ("compressed-int4", {"quant_method": "gptq"}, ["is gptq, but no linear"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "expected"), SETTINGS)
def test_settings_that_are_not_read(name: str, changes: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    path = write(name, tmp_path)
    writers.change_config(path, **changes)
    message = refuse(path)
    assert str(path) in message
    assert all(text in message for text in expected), message


MODELOPT: list[tuple[dict[str, Any] | None, list[str]]] = [
    ({"quant_algo": "NVFP4"}, ["hf_quant_config.json: quantization.quant_algo is 'nvfp4'"]),
    ({"quant_algo": None}, ["quantization.quant_algo is None"]),
    ({"quant_algo": "W4A16_AWQ", "has_zero_point": True}, ["has_zero_point is true"]),
    ({"quant_algo": "W4A16_AWQ", "group_size": 128}, ["weight_scale has shape [128, 2]", "[128, 1]"]),
    ({"quant_algo": "MIXED_PRECISION"}, ["quantized_layers does not name the linear"]),
    ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.self_attn.q_proj": "FP8"}},
     ["must be a mapping"]),
    (None, ["hf_quant_config.json: quantization must be a mapping"]),
]  # fmt: skip


@pytest.mark.parametrize(("quantization", "expected"), MODELOPT)
def test_modelopts_own_file(quantization: dict[str, Any] | None, expected: list[str], tmp_path: Path) -> None:
    path = write("modelopt-int4", tmp_path)
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    message = refuse(path)
    assert all(text in message for text in expected), message


def test_what_is_held_by_no_format_is_named_with_the_reason(tmp_path: Path) -> None:
    message = refuse(write("gptq-act-order", tmp_path), foreign="exact")
    assert "15 of 15 linears that another tool quantized are held by no format" in message
    assert "transformer.layers.0.attention.qkv has its groups scattered" in message


def test_another_mode_than_the_two(tmp_path: Path) -> None:
    path = write("awq", tmp_path)
    with pytest.raises(ConfigError, match="foreign 'maybe' is neither exact nor dequantize"):
        convert_checkpoint(
            CheckpointFolder.open(path),
            FolderWorkspace(tmp_path / "engine", journal=tmp_path / "journal"),
            dtype=None,
            overflow="refuse",
            foreign="maybe",
        )
