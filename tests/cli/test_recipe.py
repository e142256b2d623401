"""The verb alone, from a measurement that is made up; solving is tested in tests/quantization/test_recipe.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, StoreError, TrtseekError


@pytest.fixture
def recipe(measured, invoke):
    """Runs `recipe small`, solved from what is measured."""

    def run(*options: str):
        return invoke("recipe", "small", "--set", f"stages.quantize.sensitivity.file={measured}", *options)

    return run


def test_what_was_edited_is_kept(recipe):
    for options, file in ((("-o", "r.yaml"), Path("r.yaml")), ((), Path("out/small/recipe.yaml"))):
        recipe("--budget", "size_ratio=0.9", *options)
        solved = file.read_text()
        recipe("--budget", "size_ratio=0.8", *options)  # another, over what nobody touched
        assert file.read_text() != solved
        recipe("--budget", "size_ratio=0.9", *options)
        file.write_text(solved + "# by hand\n")
        with pytest.raises(ConfigError, match=rf"{file} is there, and is no recipe as this version") as caught:
            recipe("--budget", "size_ratio=0.9", *options)
        assert "--force" in caught.value.hint and file.read_text() == solved + "# by hand\n"
        recipe("--budget", "size_ratio=0.9", "--force", *options)
        assert file.read_text() == solved


def test_what_cannot_be_is_refused_before_anything_is_measured(workplace, invoke, monkeypatch):
    monkeypatch.setattr("pipeline.cli.sensitivity.measure", lambda config: pytest.fail("measured"))
    with pytest.raises(ConfigError, match=r"^bits_per_weight: 4 cannot be met: the smallest formats make [45]\."):
        invoke("recipe", "small", "--budget", "bits_per_weight=4")
    Path("r.yaml").write_text("rows: []\n")
    with pytest.raises(ConfigError, match=r"^r.yaml is there"):
        invoke("recipe", "small", "--budget", "bits_per_weight=9", "-o", "r.yaml")


@pytest.mark.parametrize(("budget", "noted"), [("kl=1e-9", True), ("size_ratio=0.9", False)])
def test_a_recipe_that_quantizes_nothing_is_noted(recipe, budget, noted):
    done = recipe("--budget", budget, "--json")
    assert ("note: this recipe quantizes nothing" in done.stderr) is noted
    assert (set(json.loads(done.stdout)["units"]) == {"none"}) is noted


def test_a_measurement_of_another_model_is_no_ground(recipe, measured):
    found = json.loads(measured.read_text())
    measured.write_text(json.dumps(found | {"units": found["units"][:-1]}))
    with pytest.raises(ConfigError, match=r"s.json was measured on another model"):
        recipe("--budget", "kl=1")


def test_an_output_that_cannot_be_written_is_the_store_s_trouble(recipe, workplace):
    (workplace / "out").mkdir()
    (workplace / "out" / "small").touch()
    with pytest.raises(TrtseekError) as caught:
        recipe("--budget", "kl=1")
    assert isinstance(caught.value, StoreError) and "set `output:`" in caught.value.hint
    assert caught.value.message == "out/small is a file where a folder should be"
