"""The scale of a quantized cache, against what transformers' own cache holds after the same text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.quantization.calibration import sample_pieces
from pipeline.quantization.kv_cache import cache_step
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.quantization.support import CalibrationSettings, Settings

LARGEST = {"fp8": 448.0, "int8": 127.0}


def _workspace(path: Path) -> FolderWorkspace:
    return FolderWorkspace(path, journal=path.with_suffix(".journal"))


@pytest.mark.parametrize(
    ("write", "kind", "algo"),
    [(fixtures.llama, "fp8", "FP8"), (fixtures.deepseek_v3, "int8", "INT8"), (fixtures.deepseek_v2, "fp8", "FP8")],
)
def test_each_layers_scale_is_of_what_its_cache_holds(
    write: Callable[..., Path], kind: str, algo: str, tmp_path: Path
) -> None:
    hub = write(tmp_path / "hf", dtype="float32", tokenizer=True, num_hidden_layers=2)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return {i * 7919 % 1000} * x\n" for i in range(400)))
    convert_checkpoint(CheckpointFolder.open(hub), _workspace(tmp_path / "engine"), dtype=None, overflow="refuse")
    settings = Settings(
        method="rtn", kv_cache=kind, calibration=CalibrationSettings(files=(text,), samples=6, length=24)
    )
    source = CheckpointFolder.open(tmp_path / "engine")
    quantize_checkpoint(source, _workspace(tmp_path / "out"), settings=settings)
    found = CheckpointFolder.open(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32, attn_implementation="eager").eval()
    cache = DynamicCache()
    with torch.inference_mode():
        model(sample_pieces(source, (text,), samples=6, length=24, seed=0), cache=cache, use_cache=True)
    for layer in range(2):
        held = cache.layers[layer]
        amax = max(float(held.keys.abs().max()), float(held.values.abs().max()))
        scale = found.read(f"transformer.layers.{layer}.attention.kv_cache_scaling_factor").to_torch()
        assert scale.shape == (1,) and scale.dtype == torch.float32
        assert float(scale) == pytest.approx(amax / LARGEST[kind], rel=2**-8)
    own = json.loads((tmp_path / "out" / "config.json").read_text())["trtseek"]["quantization"]
    assert own["kv_cache_quant_algo"] == algo


def test_a_layer_that_saw_nothing_has_a_scale_that_divides() -> None:
    assert cache_step("fp8", 0.0).tolist() == [1.0]
    assert cache_step("int8", 254.0).tolist() == [2.0]
