"""The day after somebody has run benchmarks/gpu.py: with its record in the table, plugins are the default."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.passed import main as record
from tests import fixtures
from tests.end_to_end.support import Project, write_project
from tests.passes import save_fake_run

ROOT = Path(__file__).parents[2]
PLUGINS = ["moe_experts", "paged_attention", "rope_paged_kv"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Runs with a copy of plugins/, in whose table every kernel has passed on an A100, as `benchmarks.passed` wrote
    it."""
    plugins = tmp_path / "recorded" / "plugins"
    shutil.copytree(ROOT / "plugins", plugins, ignore=shutil.ignore_patterns("__pycache__"))
    run = save_fake_run(tmp_path / "run.json", sm=80, device="NVIDIA A100")
    assert record([str(run)], plugins / "passed.json") == 0
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(plugins.parent), str(ROOT)]))
    project = write_project(tmp_path / "run", fixtures.deepseek_v2(tmp_path / "hf", tokenizer=True))
    config = yaml.safe_load(project.config.read_text())
    del config["stages"]["build"]["lowering"]
    project.config.write_text(yaml.safe_dump(config))
    return project


@pytest.mark.slow
def test_a_recorded_run_makes_plugins_the_default(project: Project) -> None:
    quick = ("--set", "stages.quantize.method=rtn", "--set", "stages.quantize.kv_cache=int8")

    def run(*arguments: str) -> str:
        result = project.trtseek(*arguments, "tiny.yaml", *quick)
        assert result.returncode == 0, result.stderr
        return result.stdout

    notes = run("validate")  # the cache in 8 bits is the plugins', which nobody has asked for by name
    assert "engine.json says whether" in notes and "nothing to exchange" not in notes
    worlds = json.loads(run("plan", "--json"))["worlds"]["others"]
    assert not any("stages.build.lowering" in world["loses"] for world in worlds)

    run("engine", "--until", "build")
    engine: dict[str, Any] = json.loads((project.run / "build/engine.json").read_text())
    assert sorted(name for name, how in engine["spec"]["lowering"].items() if how == "plugin") == PLUGINS
    kernels = [kernel for plugin in engine["plugins"] for kernel in plugin["kernels"]]
    assert kernels and all(kernel["passed"].startswith("NVIDIA A100, ") for kernel in kernels)
    proof = json.loads((project.run / "verify/verify.json").read_text())
    gates = {gate["name"]: gate["passed"] for gate in proof["gates"]}
    assert gates["network_exact"] and gates["lowerings_agree"] and gates["network_cache"]
