from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import ConfigError
from pipeline.quantization.selection import Rules
from pipeline.quantization.sensitivity_file import load_sensitivity, read_sensitivity


def test_a_measurement_of_another_model_is_refused(llama_path: Path, tmp_path: Path) -> None:
    architecture, rules = CheckpointFolder.open(llama_path).architecture, Rules(method="rtn", include=("mlp",))
    unit = {"layer": 0, "unit": "attention.qkv", "weights": 5, "bytes": 10, "vector_bytes": 0}
    (tmp_path / "s.json").write_text(json.dumps({"bytes": 10, "units": [{**unit, "patterns": [], "candidates": {}}]}))
    with pytest.raises(ConfigError, match=r"s.json was measured on another model, .* layer 0, attention"):
        read_sensitivity(tmp_path / "s.json", architecture, rules)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xff", "is no sensitivity.json"),
        (b"[]", "is no sensitivity.json"),
        (b'{"bytes": 5}', "it lacks 'units'"),
        (b'{"bytes": 5, "units": [{"layer": 0}]}', "it lacks 'weights'"),
        (b"UNIT kl: null", "layer 0, mlp.fc holds no figures"),
        (b"UNIT bogus: 1", "bogus is no method of this version"),
        (b"UNIT rtn/16: 1", "rtn/16 is no group size of this version"),
    ],
)
def test_what_is_no_measurement_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    if content.startswith(b"UNIT"):
        name, value = content.decode().removeprefix("UNIT ").split(": ")
        candidates = {"int8" if name == "kl" else name: {"kl": json.loads(value), "bytes": 5}}
        unit = {"layer": 0, "unit": "mlp.fc", "weights": 5, "bytes": 10, "vector_bytes": 0, "patterns": ["a"]}
        content = json.dumps({"bytes": 10, "units": [{**unit, "candidates": candidates}]}).encode()
    (tmp_path / "s.json").write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        load_sensitivity(tmp_path / "s.json")
    with pytest.raises(ConfigError, match="none: No such file"):
        load_sensitivity(tmp_path / "none")
