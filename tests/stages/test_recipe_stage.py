"""recipe: auto in the quantize stage: solved, left as a file, and the same as that file named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.sensitivity import measure
from pipeline.config.load import load_config
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.quantization import sensitivity
from pipeline.stages.executor import Executor
from pipeline.stages.graph import load_stages
from pipeline.stages.quantize import STAGE
from tests.fixtures import llama

AUTO = """\
model: {path: model}
target: {gpu: A100-80GB}
output: out
stages:
  convert: {dtype: float16}
  quantize:
    method: rtn
    group_size: 64
    include: [mlp, attention_input, attention_output]
    recipe: auto
    budget: {bits_per_weight: 6}
    sensitivity: {samples: 4, length: 32}
    calibration: {files: [text.txt], samples: 4, length: 32}
  verify: {heldout: {files: [text.txt]}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    llama(tmp_path / "model", num_hidden_layers=2, tokenizer=True)
    (tmp_path / "text.txt").write_text("".join(f"def f{i}(x):\n    return {i * 7919 % 1000} * x\n" for i in range(200)))
    (tmp_path / "auto.yaml").write_text(AUTO)
    return tmp_path


def run(config: Config) -> dict[str, Any]:
    folder = Executor(config, load_stages()).run(until="quantize")["quantize"].path
    report: dict[str, Any] = json.loads((folder / "quantization.json").read_text())
    return {"folder": folder, "report": report}


def parameters(*overrides: str) -> dict[str, Any]:
    return dict(STAGE.parameters(load_config("auto.yaml", overrides)))


def test_auto_is_solved_and_its_file_does_the_same(folder: Path) -> None:
    first = run(load_config("auto.yaml"))
    linears = first["report"]["linears"]
    weights = {name: linear["format"] for name, linear in linears.items()}
    assert set(weights.values()) == {"int4", "int8"}
    found = json.loads((first["folder"] / "sensitivity.json").read_text())
    budget = sum(unit["weights"] for unit in found["units"]) * 6 // 8
    others = found["bytes"] - sum(unit["bytes"] for unit in found["units"])
    assert budget * 0.9 < first["report"]["bytes_after"] - others <= budget
    named = run(load_config("auto.yaml", [f"stages.quantize.recipe={first['folder']}/recipe.yaml"]))
    assert named["report"]["linears"] == linears
    for shard in sorted(first["folder"].glob("*.safetensors")):
        assert shard.read_bytes() == (named["folder"] / shard.name).read_bytes()
    # From the file that was measured the recipe is the same.
    again = run(load_config("auto.yaml", [f"stages.quantize.sensitivity.file={first['folder']}/sensitivity.json"]))
    assert (again["folder"] / "recipe.yaml").read_bytes() == (first["folder"] / "recipe.yaml").read_bytes()


def test_what_decides_is_in_the_fingerprint(folder: Path) -> None:
    base = parameters()
    assert base["formats"] == ("int4", "int8")
    assert parameters("stages.quantize.budget.bits_per_weight=5") != base
    # FP8 is there to choose from where the target has it.
    assert parameters("target.gpu=L4")["formats"] == ("int4", "int8", "fp8_blocks")


def test_a_budget_is_no_part_of_what_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is who asks for it."""
    with pytest.raises(ConfigError, match=r"budget.bits_per_weight: 1 cannot be met: the least is 4"):
        run(load_config("auto.yaml", ["stages.quantize.budget.bits_per_weight=1"]))
    measured = [*Path("out/store/sensitivity").glob("*/sensitivity.json")]
    assert len(measured) == 1
    with monkeypatch.context() as refused:
        refused.setattr(sensitivity, "_Run", lambda *_: pytest.fail("measured again"))
        assert run(load_config("auto.yaml"))["report"]["quant_algo"] == "MIXED_PRECISION"
        plain = ["stages.quantize.recipe.rows=[]", "stages.quantize.budget=null"]
        for others in ([], ["stages.quantize.calibration.samples=5"], ["stages.quantize.kv_cache=int8"]):
            assert measure(load_config("auto.yaml", [*plain, *others])).read_bytes() == measured[0].read_bytes()
    measure(load_config("auto.yaml", ["stages.quantize.sensitivity.samples=5"]))
    assert len([*Path("out/store/sensitivity").glob("*/sensitivity.json")]) == 2


def test_a_recipe_counts_by_its_rows(folder: Path) -> None:
    rows = "rows:\n  - {pattern: '*.mlp.*', method: int8, reason: because}\n"
    (folder / "r.yaml").write_text(rows)
    named = "stages.quantize.recipe=r.yaml"
    base = parameters(named)
    # Neither a reason, nor what auto alone reads, makes anything new.
    (folder / "r.yaml").write_text(rows.replace("because", "by hand"))
    assert parameters(named) == base == parameters(named, "stages.quantize.sensitivity.samples=5")
    (folder / "r.yaml").write_text(rows.replace("int8", "none"))
    assert parameters(named) != base
    assert "calibration" not in STAGE.sources(load_config("auto.yaml", [named]))
