"""Sizes that `plan` foretells, held against what convert and quantize write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.checked_headers import read_checked
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.layouts.scales import CACHE_SCALES
from pipeline.cli.host import describe_host
from pipeline.config.case import Case
from pipeline.config.schema import Config
from pipeline.engine.weights import estimate_weights
from pipeline.errors import StoreError
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.quantization.selection import Rules
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.checkpoint.foreign.cases import CASES, write


def _config(model: Path, output: Path, **stages: Any) -> Config:
    return Config(name="x", model={"path": model}, target={"gpu": "L4"}, output=output, stages=stages)


def _case(config: Config, source: CheckpointFolder) -> Case:
    return Case(config=config, architecture=source.architecture, tensors=source.tensors)


def _written(folder: Path) -> int:
    return sum(info.nbytes for info in CheckpointFolder.open(folder).tensors.values())


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
@pytest.mark.parametrize(
    "model",
    [
        lambda path: fixtures.llama(path, num_hidden_layers=3),
        lambda path: fixtures.deepseek_v2(path, num_hidden_layers=3),
        lambda path: fixtures.qwen2(path, tie_word_embeddings=True),
        lambda path: fixtures.deepseek_v3(path, fp8=True),
        lambda path: fixtures.deepseek_v3(path, mtp=False),
    ],
    ids=["llama", "v2", "qwen2", "v3-fp8", "v3-without-mtp"],
)
def test_disk_is_what_the_stages_write(model: Any, dtype: str | None, tmp_path: Path) -> None:
    source = CheckpointFolder.open(model(tmp_path / "model"))
    config = _config(source.path, tmp_path / "out", convert={"dtype": dtype}, quantize={"method": "rtn"})
    rows = {row["stage"]: row for row in describe_host(_case(config, source))["stages"]}
    convert_checkpoint(source, FolderWorkspace(tmp_path / "converted"), dtype=dtype, overflow="refuse")
    assert rows["convert"]["disk_bytes"] == _written(tmp_path / "converted")
    converted = CheckpointFolder.open(tmp_path / "converted")
    quantize_checkpoint(converted, FolderWorkspace(tmp_path / "quantized"), settings=config.stages.quantize)
    assert rows["quantize"]["disk_bytes"] == _written(tmp_path / "quantized")


class Asked(FolderWorkspace):
    """Refuses, and keeps what was asked for."""

    def require(self, nbytes: int) -> None:
        self.asked = nbytes
        raise StoreError("enough")


def test_the_disk_of_calibration_is_what_quantizing_asks_for(tmp_path: Path) -> None:
    source = CheckpointFolder.open(fixtures.deepseek_v2(tmp_path / "model", num_hidden_layers=3, tokenizer=True))
    (tmp_path / "text.txt").write_text("def f(x): return x\n" * 200)
    calibration = {"files": ({"path": tmp_path / "text.txt"},), "samples": 8, "length": 64}
    config = _config(source.path, tmp_path / "out", quantize={"method": "awq", "calibration": calibration})
    row = next(row for row in describe_host(_case(config, source))["stages"] if row["stage"] == "quantize")
    convert_checkpoint(source, FolderWorkspace(tmp_path / "converted"), dtype=None, overflow="refuse")
    workspace = Asked(tmp_path / "quantized")
    with pytest.raises(StoreError):
        quantize_checkpoint(CheckpointFolder.open(tmp_path / "converted"), workspace, settings=config.stages.quantize)
    # Which scales become vectors beside the linears, only the search knows: quantizing asks for all of them.
    assert row["disk_bytes"] < workspace.asked < 1.05 * row["disk_bytes"]
    assert row["scratch_bytes"] == 3 * 8 * 64 * source.architecture.hidden_size * 4


def test_a_recipe_is_counted_linear_by_linear(tmp_path: Path) -> None:
    """Rows that name layers, experts, another group, 8 bits, and what is to stay as it is."""
    source = CheckpointFolder.open(fixtures.deepseek_v2(tmp_path / "model", num_hidden_layers=3))
    rows = [
        {"pattern": "*.layers.0.mlp.*", "method": "int8"},
        {"pattern": "*.layers.1.mlp.experts.*", "method": "rtn", "group_size": 32},
        {"pattern": "*.layers.2.attention.dense", "method": "none"},
    ]
    config = _config(source.path, tmp_path / "out", quantize={"method": "rtn", "recipe": {"rows": tuple(rows)}})
    forecast = {row["stage"]: row for row in describe_host(_case(config, source))["stages"]}
    convert_checkpoint(source, FolderWorkspace(tmp_path / "converted"), dtype=None, overflow="refuse")
    converted = CheckpointFolder.open(tmp_path / "converted")
    quantize_checkpoint(converted, FolderWorkspace(tmp_path / "quantized"), settings=config.stages.quantize)
    assert forecast["quantize"]["disk_bytes"] == _written(tmp_path / "quantized")


@pytest.mark.parametrize("name", CASES)
def test_what_another_tool_quantized_is_counted_as_it_is_held(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    config = _config(path, tmp_path / "out", quantize={"method": "none"})
    headers = read_checked(path, tmp_path / "memory")
    case = Case(config=config, architecture=headers.architecture, tensors=headers.tensors, holding=headers.holding)
    workspace = FolderWorkspace(tmp_path / "converted")
    convert_checkpoint(CheckpointFolder.open(path), workspace, dtype=None, overflow="refuse", foreign="dequantize")
    written = CheckpointFolder.open(tmp_path / "converted")
    scales = sum(info.nbytes for name, info in written.tensors.items() if name.endswith(CACHE_SCALES))
    row = describe_host(case)["stages"][0]
    assert row["disk_bytes"] == _written(written.path) - scales


def test_stages_that_will_not_run_are_left_out(tmp_path: Path, llama_path: Path) -> None:
    source = CheckpointFolder.open(llama_path)
    config = _config(llama_path, tmp_path, quantize={"method": "none"})
    host = describe_host(_case(config, source))
    assert [row["stage"] for row in host["stages"]] == ["convert", "build"]
    assert host["disk_bytes"] == sum(row["disk_bytes"] for row in host["stages"])
    assert host["free_bytes"] > 0


def test_an_engine_without_weights_takes_little_of_disk_and_memory(tmp_path: Path, llama_path: Path) -> None:
    source = CheckpointFolder.open(llama_path)
    builds = []
    for weights in ("full", "stripped"):
        config = _config(llama_path, tmp_path, quantize={"method": "awq"}, build={"weights": weights})
        rows = describe_host(_case(config, source))["stages"]
        assert rows[1]["seconds"] is None and rows[1]["memory_bytes"] is None  # AWQ was not measured at size
        builds.append(rows[2])
    full, stripped = builds
    rules = Rules(method="rtn", include=config.stages.quantize.include)
    weights_bytes = estimate_weights(source.architecture, dtype="bfloat16", max_seq_len=4096, rules=rules)
    assert full["disk_bytes"] - stripped["disk_bytes"] == weights_bytes
    assert stripped["seconds"] > 0
