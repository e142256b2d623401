"""quantization.json: the heat map by hand, coverage and experts of a whole run, and reading back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import QuantizationError
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.quantization.report import QuantizationReport
from pipeline.workspace import FolderWorkspace
from tests.quantization.support import CalibrationSettings, Model, Settings

ROW = {"method": "awq", "format": "int4", "group_size": 64, "weights": 1000, "bytes": 600, "scale": None}


def row(group: str, alpha: float | None, before: float | None, after: float | None, clipped: bool) -> dict[str, Any]:
    losses = {"loss_before": before, "loss_after": after}
    return {**ROW, "alpha": alpha, "clipped": clipped, "scale_group": f"transformer.layers.{group}", **losses}


def test_the_heat_map_averages_what_shares_a_scale(tmp_path: Path) -> None:
    report = QuantizationReport(
        method="awq",
        quant_algo="W4A16_AWQ",
        group_size=64,
        calibration=None,
        linears={
            "a.fc": row("0.mlp.fc", 0.5, 0.02, 0.01, True),
            "a.gate": row("0.mlp.fc", 0.5, 0.04, 0.02, False),
            "e.0": row("1.mlp.experts.0.proj", 0.2, 0.1, 0.1, False),
            "e.1": row("1.mlp.experts.1.proj", 0.4, 0.3, 0.2, False),
            "e.2": row("1.mlp.experts.2.proj", None, None, None, False),
            "lm_head": row("", None, None, None, False)
            | {"scale_group": "lm_head", "format": "int8", "group_size": None},
            "e.3": row("1.mlp.experts.3.proj", 0.6, 0.5, 0.4, True) | {"group_size": 32, "bytes": 700},
        },
        unquantized={},
        smaller_groups={},
        idle_patterns=[],
        experts={},
        coverage={},
        bytes_before=100,
        bytes_after=40,
    )
    shape = {"method": "awq", "format": "int4", "group_size": 64}
    assert report.heat_map == [
        {"layer": 0, "group": "mlp.fc", "linears": 2, **shape, "alpha": 0.5, "clipped": 0.5}
        | {"loss_before": 0.03, "loss_after": 0.015},
        {"layer": 1, "group": "mlp.experts.*.proj", "linears": 3, **shape, "alpha": 0.3, "clipped": 0.0}
        | {"loss_before": 0.2, "loss_after": 0.15},
        {"layer": None, "group": "lm_head", "linears": 1, **shape, "alpha": None, "clipped": 0.0}
        | {"loss_before": None, "loss_after": None, "format": "int8", "group_size": None},
        {"layer": 1, "group": "mlp.experts.*.proj", "linears": 1, **shape, "alpha": 0.6, "clipped": 1.0}
        | {"loss_before": 0.5, "loss_after": 0.4, "group_size": 32},
    ]
    assert (report.ratio, report.linears_ratio) == (0.4, 4300 / 14000)
    report.write(tmp_path / "q.json")
    assert QuantizationReport.read(tmp_path / "q.json") == report
    assert json.loads((tmp_path / "q.json").read_text())["heat_map"] == report.heat_map


class Notes:
    """A Progress that keeps what is worth keeping, and the items."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.items: list[str] = []

    def start(self, item: str, total: float, unit: str) -> None:
        self.items.append(item)

    def advance(self, amount: float) -> None: ...
    def note(self, message: str) -> None:
        self.notes.append(message)


def test_a_run_tells_whether_its_text_is_enough(tmp_path: Path, deepseek_v2_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("".join(f"def f{i}(x):\n    return {i * 7919 % 1000} * x\n" for i in range(400)))
    source = Model.load(deepseek_v2_path).write(tmp_path / "engine", deepseek_v2_path)
    few = CalibrationSettings(files=(text,), samples=2, length=16)
    progress = Notes()
    report = quantize_checkpoint(
        source,
        FolderWorkspace(tmp_path / "out", journal=tmp_path / "journal"),
        settings=Settings(method="awq", calibration=few),
        progress=progress,
    )
    assert progress.items[:2] == ["tokenizing t.txt", "calibrating layer 0"]
    layers = report.coverage["layers"]
    assert layers.keys() == {str(layer) for layer in range(source.architecture.num_layers)}
    assert {"self_attn.o_proj", "mlp.experts"} <= layers["1"].keys()
    assert all(0 < figures["score"] < 1 and figures["entropy"] < 1 for figures in layers["1"].values())
    assert report.coverage["changing"] and report.coverage["change"] > report.coverage["threshold"]
    assert any("more calibration text would change the scales" in note for note in progress.notes)
    # Every tensor to quantize is on the map, and 32 tokens are too few for some of the experts.
    assert sum(cell["linears"] for cell in report.heat_map) == len(report.linears)
    assert all(cell["loss_after"] <= cell["loss_before"] for cell in report.heat_map if cell["loss_before"] is not None)
    assert sum(report.experts["1"]["tokens"]) == 32 * source.architecture.experts.top_k  # type: ignore[union-attr]
    assert set(report.experts["1"]["unrouted"].values()) == {"round_to_nearest"}


@pytest.mark.parametrize("policy", ["round_to_nearest", "share_scale", "error"])
def test_experts_with_too_few_tokens(tmp_path: Path, deepseek_v2_path: Path, policy: str) -> None:
    text = tmp_path / "t.txt"
    text.write_text("x = 1\n" * 100)
    source = Model.load(deepseek_v2_path).write(tmp_path / "engine", deepseek_v2_path)
    few = CalibrationSettings(files=(text,), samples=1, length=16)
    settings = Settings(method="awq", include=("experts",), calibration=few, unrouted_experts=policy)
    workspace = FolderWorkspace(tmp_path / "out", journal=tmp_path / "journal")
    if policy == "error":
        with pytest.raises(
            QuantizationError, match=r"layer 1: calibration sent fewer than 32 tokens to \d+ of \d+ exp"
        ):
            quantize_checkpoint(source, workspace, settings=settings)
        return
    report = quantize_checkpoint(source, workspace, settings=settings)
    starved = report.experts["1"]["unrouted"]
    assert starved and set(starved.values()) == {policy}
    losses = {
        name: linear["loss_before"]
        for name, linear in report.linears.items()
        if name.split(".experts.")[-1].split(".")[0] in starved and ".layers.1." in name
    }
    assert losses and all((loss is not None) == (policy == "share_scale") for loss in losses.values())
