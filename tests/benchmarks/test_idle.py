"""The network that costs nothing stands where the backend looks for the real one."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import pipeline
from benchmarks.idle import IdleRunner, replace_network, write_backends
from pipeline.triton.backend import loading


def test_the_backend_loads_it_with_the_packages_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loading.Loaded(runner=SimpleNamespace(), limits=SimpleNamespace(), vocab_size=64, kind="interpreter")
    monkeypatch.setattr(loading, "load_model", lambda folder, parameters: real)
    (code,) = write_backends(Path(pipeline.__file__).parents[1] / "model_repo" / "backends", tmp_path, 0.25).glob(
        "*/model.py"
    )
    (line,) = [line.strip() for line in code.read_text().splitlines() if line.strip().startswith("replace_network(")]
    assert line == "replace_network(0.25)"
    assert "from pipeline.triton.backend.loading import load_model" in code.read_text()
    replace_network(0.25)
    loaded = loading.load_model(tmp_path, {})
    assert isinstance(loaded.runner, IdleRunner) and loaded.runner.seconds == 0.25
    assert (loaded.limits, loaded.vocab_size, loaded.kind) == (real.limits, 64, "idle network")
