"""A small config over a random checkpoint, with toy stages in the place of the real ones."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.stages.graph import Stage
from tests.stages.toys import run_link


@pytest.fixture
def workplace(tmp_path, monkeypatch, llama_path) -> Path:
    """The current folder, with `configs/small.yaml` and text to read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "text.txt").write_text("def f(): pass\n" * 100)
    (tmp_path / "configs" / "small.yaml").write_text(
        f"model: {{path: {llama_path}}}\n"
        "target: {gpu: RTX 4090}\n"
        "stages:\n"
        "  quantize: {group_size: 32, calibration: {files: [text.txt], samples: 2, length: 16}}\n"
        "  verify: {heldout: {files: [text.txt], tokens: 64, window: 16}}\n"
        "  build: {max_seq_len: 128, max_batch_size: 2, max_num_tokens: 64}\n"
    )
    return tmp_path


@pytest.fixture
def measured(workplace, llama_path) -> Path:
    """s.json: a sensitivity.json of the small config, made up."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.load import load_config
    from pipeline.quantization.sensitivity_file import list_model_units

    units = [
        {
            "layer": unit.layer,
            "unit": unit.place,
            "patterns": unit.patterns,
            "weights": unit.weights,
            "bytes": 2 * unit.weights,
            "vector_bytes": 0,
            "candidates": {"int8": {"kl": 0.01, "bytes": unit.weights}},
        }
        for unit in list_model_units(
            CheckpointFolder.open(llama_path).architecture, load_config("small").stages.quantize.rules
        )
    ]
    total = sum(unit["bytes"] for unit in units)
    (workplace / "s.json").write_text(json.dumps({"bytes": total, "units": units}))
    return workplace / "s.json"


@pytest.fixture
def toy_stages(monkeypatch) -> tuple[Stage, ...]:
    def run_first(context):
        context.progress.note("working")
        (context.workspace.path / "one.txt").write_text(str(context.parameters))

    stages = (
        Stage(
            name="convert",
            version=1,
            run=run_first,
            parameters=lambda config: config.stages.convert.model_dump(mode="json"),
            sources=lambda config: {"model": [config.model.path]},
        ),
        Stage(name="package", version=1, run=run_link, inputs=("convert",)),
    )
    monkeypatch.setattr("pipeline.stages.graph.load_stages", lambda: stages)
    return stages


@pytest.fixture
def invoke():
    """Runs the verbs in this process; errors pass through."""
    from pipeline.cli.main import cli

    def run(*arguments: str):
        return CliRunner().invoke(cli, list(arguments), standalone_mode=False, catch_exceptions=False)

    return run


# What a command is held against: importing these, which took so many seconds of processor on the machine whose figures
# benchmarks/RESULTS.md has.
MODULES = "asyncio, http.client, unittest.mock, sqlite3, xml.dom.minidom, email.message, multiprocessing.managers"
MODULES_S = 0.12


@pytest.fixture
def cpu_seconds():
    """User and system time of `python ARGUMENTS`, the least of some runs, on the machine of benchmarks/RESULTS.md.

    It is what the command costs, not what else the machine does, nor how fast it is: others are three times as slow.
    Where nothing else runs it is also the wall time, since nothing here waits or runs in parallel.
    """

    def measure(*arguments: str, runs: int = 3) -> float:
        return take(*arguments, runs=runs) * MODULES_S / take("-c", f"import {MODULES}", runs=3)

    def take(*arguments: str, runs: int) -> float:
        times = []
        for _ in range(runs):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert done.returncode == 0, done.stderr
            times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        return min(times)

    return measure


@pytest.fixture(autouse=True)
def no_digest_cache():
    """An Executor turns the cache on for the process; no test leaves it to the next."""
    from pipeline.digest import set_digest_cache

    yield
    set_digest_cache(None)
