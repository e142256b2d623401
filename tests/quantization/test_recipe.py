"""Recipes: what is chosen, by hand; budgets as they are counted; the file, read again by the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load_config
from pipeline.errors import ConfigError
from pipeline.quantization.options import Goal
from pipeline.quantization.recipe import Recipe, solve


def unit(layer: int, kl: dict[str, float], *, weights: int = 1000, vectors: int = 0) -> dict[str, Any]:
    bits = {"rtn/128": 4.25, "rtn/64": 4.5, "int8": 8}
    figures = {name: {"kl": value, "error": 0.1, "bytes": int(weights * bits[name] / 8)} for name, value in kl.items()}
    return {
        "layer": layer,
        "unit": "mlp.fc+gate",
        "role": "mlp",
        "patterns": [f"transformer.layers.{layer}.mlp.{name}" for name in ("fc", "gate")],
        "weights": weights,
        "bytes": 2 * weights,
        "vector_bytes": vectors,
        "candidates": figures,
    }


# Three units: one that does not mind, one in between, one that INT4 hurts. 16 bits: 2000 bytes each, 1000 for others.
UNITS = [
    unit(0, {"rtn/128": 0.0011, "rtn/64": 0.0010, "int8": 0.0001}),
    unit(1, {"rtn/128": 0.0300, "rtn/64": 0.0200, "int8": 0.0004}),
    unit(2, {"rtn/128": 0.9000, "rtn/64": 0.8000, "int8": 0.0050}),
]
MEASURED = {"bytes": 7000, "units": UNITS}


def picks(recipe: Recipe) -> list[str]:
    """method/group of each unit."""
    rows = [row.override for row in recipe.rows]
    assert [row.pattern for row in rows[::2]] == [f"transformer.layers.{layer}.mlp.fc" for layer in range(3)]
    assert [(row.method, row.group_size) for row in rows[::2]] == [(r.method, r.group_size) for r in rows[1::2]]
    return [f"{row.method}/{row.group_size}" for row in rows[::2]]


def test_bits_go_where_they_help() -> None:
    """One unit can have INT8 at an average of 5.75 bits: 1000 more, and the others 4.5 or 4.25 + 4.5."""
    recipe = solve(MEASURED, "rtn", Goal(kind="bits_per_weight", limit=5.60))
    assert picks(recipe) == ["rtn/128", "rtn/64", "int8/None"]
    assert recipe.bits_per_weight == pytest.approx((531 + 562 + 1000) * 8 / 3000)
    assert recipe.kl == pytest.approx(0.0011 + 0.02 + 0.005)
    assert recipe.size_ratio == pytest.approx((1000 + 531 + 562 + 1000) / 7000)
    assert recipe.counts == {"rtn/128": 1, "rtn/64": 1, "int8": 1}


def test_a_size_ratio_counts_the_whole_checkpoint() -> None:
    exact = (1000 + 531 + 562 + 1000) / 7000
    assert picks(solve(MEASURED, "rtn", Goal(kind="size_ratio", limit=exact))) == ["rtn/128", "rtn/64", "int8/None"]
    assert picks(solve(MEASURED, "rtn", Goal(kind="size_ratio", limit=exact - 1e-4))) == [
        "rtn/128",
        "rtn/128",
        "int8/None",
    ]
    assert picks(solve(MEASURED, "rtn", Goal(kind="size_ratio", limit=1.0))) == ["none/None"] * 3


def test_the_smallest_within_a_divergence() -> None:
    recipe = solve(MEASURED, "rtn", Goal(kind="kl", limit=0.03))
    assert picks(recipe) == ["rtn/128", "rtn/64", "int8/None"]
    assert picks(solve(MEASURED, "rtn", Goal(kind="kl", limit=0.0066)))[1:] == ["int8/None", "int8/None"]
    assert recipe.kl <= 0.03


def test_a_stand_in_is_named_for_what_it_stands_for() -> None:
    """Rounding was measured for AWQ, whose vector takes 40 bytes more."""
    measured = {"bytes": 3000, "units": [unit(0, {"rtn/64": 0.1}, vectors=40)]}
    recipe = solve(measured, "awq", Goal(kind="bits_per_weight", limit=5))
    assert (recipe.rows[0].override.method, recipe.rows[0].override.group_size) == ("awq", 64)
    assert recipe.bits_per_weight == pytest.approx((562 + 40) * 8 / 1000)
    with pytest.raises(ConfigError, match="cannot be met"):
        solve(measured, "awq", Goal(kind="bits_per_weight", limit=4.7))


def test_only_the_formats_that_are_offered() -> None:
    chosen = picks(solve(MEASURED, "rtn", Goal(kind="bits_per_weight", limit=8.5), formats=("int4",)))
    assert chosen == ["rtn/128", "rtn/64", "none/None"] or "int8/None" not in chosen


def test_what_cannot_be_met_says_what_can() -> None:
    with pytest.raises(ConfigError, match=r"budget.size_ratio: 0.3 cannot be met: the least is 0.3704"):
        solve(MEASURED, "rtn", Goal(kind="size_ratio", limit=0.3))


def test_the_file_is_what_a_config_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = solve(MEASURED, "rtn", Goal(kind="bits_per_weight", limit=5.6))
    Path("recipe.yaml").write_text(recipe.render())
    Path("c.yaml").write_text("model: {path: m}\ntarget: {gpu: L4}\nstages: {quantize: {recipe: recipe.yaml}}\n")
    quantize = load_config("c.yaml").stages.quantize
    assert quantize.rules.recipe == tuple(row.override for row in recipe.rows)
    reasons = [row.reason for row in quantize.recipe.rows]
    assert reasons == [row.reason for row in recipe.rows]
    assert reasons[0] == "KL 0.0011 in 4.25 bits; rtn/64 0.001 for 4.50 bits"
    assert reasons[-1] == "KL 0.005 in 8.00 bits; rtn/64 would make it 0.8; none 0 for 16.00 bits"
    assert "bits_per_weight 5.6" in recipe.render().splitlines()[0]
