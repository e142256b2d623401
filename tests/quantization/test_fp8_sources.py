"""INT4 straight from FP8 blocks: as from the same numbers in float32, with nothing in FP8 left in the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.block_scales import read_weight
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.quantization import int4, shard
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.quantization.support import CalibrationSettings, Settings

MTP = "transformer.mtp_layers."
SCALES = ".weights_block_scaling_factor"
# 192 and 320: ragged blocks; no power of two but 64 divides them.
WIDTHS = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}
ALL = ("experts", "shared_experts", "mlp", "attention_output", "attention_input")


def workspace(path: Path) -> FolderWorkspace:
    return FolderWorkspace(path, journal=path.with_suffix(".journal"))


def load_all(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    folder = tmp_path_factory.mktemp("v3")
    hub = CheckpointFolder.open(fixtures.deepseek_v3(folder / "hf", fp8=True, tokenizer=True, **WIDTHS))
    convert_checkpoint(hub, workspace(folder / "engine"), dtype=None, overflow="refuse")
    return CheckpointFolder.open(folder / "engine")


@pytest.fixture(scope="module")
def multiplied(engine: CheckpointFolder) -> CheckpointFolder:
    """The same checkpoint, its blocks in float32: every number as it is, and the model's type still bfloat16."""
    path = engine.path.with_name("multiplied")
    path.mkdir()
    names = [name for name in engine.tensors if not name.endswith(SCALES)]
    save_file({name: read_weight(engine, name).clone() for name in names}, path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_bytes((engine.path / name).read_bytes())
    return CheckpointFolder.open(path)


def settings(method: str, text: Path, **options: Any) -> Settings:
    calibration = CalibrationSettings(files=(text,), samples=12, length=32)
    return Settings(method=method, calibration=calibration, include=ALL, group_size=64, **options)


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_as_from_the_same_numbers_in_float32(
    method: str,
    engine: CheckpointFolder,
    multiplied: CheckpointFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return {i * 7919 % 1000} * x\n" for i in range(400)))
    found = load_all(_quantize(engine, tmp_path / "fp8", settings(method, text)))
    # Of a float32 tensor nobody knows that its type is not meant; here the test does.
    blocks = {name.removesuffix(SCALES) + ".weight" for name in engine.tensors if name.endswith(SCALES)}
    monkeypatch.setattr(shard, "_is_widened", lambda info: info.name in blocks)
    expected = load_all(_quantize(multiplied, tmp_path / "float32", settings(method, text)))
    decoder = {name: tensor for name, tensor in found.items() if not name.startswith(MTP)}
    assert decoder.keys() == {name for name in expected if not name.startswith(MTP)}
    assert sum(tensor.dtype == torch.int8 for tensor in decoder.values()) == 60
    assert decoder["transformer.layers.1.attention.kv_b_proj.weight"].dtype == torch.bfloat16
    for name, tensor in decoder.items():
        assert tensor.dtype != torch.float8_e4m3fn
        assert torch.equal(tensor, expected[name]), name


def _quantize(source: CheckpointFolder, output: Path, options: Settings) -> Path:
    quantize_checkpoint(source, workspace(output), settings=options)
    return output


def test_rounding_to_nearest_loses_nothing_to_16_bits_between(engine: CheckpointFolder, tmp_path: Path) -> None:
    """The packed weights are those of the exact products, and not those of products rounded to bfloat16 first."""
    found = load_all(_quantize(engine, tmp_path / "int4", settings("rtn", tmp_path / "unread")))
    name = "transformer.layers.0.mlp.fc"
    exact = read_weight(engine, f"{name}.weight")
    q, scales = int4.quantize(exact, 64, scale_dtype=torch.bfloat16)
    assert torch.equal(int4.unpack(found[f"{name}.weight"]), q)
    assert torch.equal(found[f"{name}.weights_scaling_factor"], scales)
    twice, _ = int4.quantize(exact.bfloat16(), 64, scale_dtype=torch.bfloat16)
    assert not torch.equal(twice, q)


def test_the_mtp_layer_stays_as_it_was(engine: CheckpointFolder, tmp_path: Path) -> None:
    output = _quantize(engine, tmp_path / "int4", settings("rtn", tmp_path / "unread"))
    found, before = load_all(output), load_all(engine.path)
    mtp = [name for name in before if name.startswith(MTP)]
    assert len(mtp) > 100
    for name in mtp:
        assert found[name].dtype == before[name].dtype
        assert torch.equal(found[name].view(torch.uint8), before[name].view(torch.uint8))
    files = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    assert {files[name] for name in mtp} == {"model-00004-of-00004.safetensors"}
    config = json.loads((output / "config.json").read_text())["trtseek"]
    assert config["fp8_blocks"] == [128, 128]
    assert not any(name.startswith(MTP) for name in config["quantization"]["quantized"])
    bias = "transformer.layers.1.mlp.router.e_score_correction_bias"
    assert torch.equal(found[bias], before[bias])
    assert found[bias].dtype == torch.float32


def test_without_an_mtp_layer_nothing_speaks_of_fp8(tmp_path: Path) -> None:
    hub = CheckpointFolder.open(fixtures.deepseek_v3(tmp_path / "hf", fp8=True, mtp=False, num_hidden_layers=1))
    convert_checkpoint(hub, workspace(tmp_path / "engine"), dtype=None, overflow="refuse")
    source = CheckpointFolder.open(tmp_path / "engine")
    output = _quantize(source, tmp_path / "int4", settings("rtn", tmp_path / "unread"))
    assert "fp8_blocks" not in json.loads((output / "config.json").read_text())["trtseek"]
    assert sorted(file.name for file in output.glob("*.safetensors")) == [
        f"model-{i:05}-of-00002.safetensors" for i in (1, 2)
    ]
