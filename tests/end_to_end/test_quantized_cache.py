"""A quantized KV cache through `trtseek engine`: asked for, proved, counted, built, and served from the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.runtime.generation import generate
from pipeline.triton.backend.loading import Loaded, load_model
from pipeline.triton.model_config import parse_config
from tests import fixtures
from tests.end_to_end.support import Project, write_project

PLUGINS = "stages.build.lowering={rope_paged_kv: plugin, paged_attention: plugin}"


def load(project: Project) -> Loaded:
    """What Triton's process does, without the process."""
    folder = next(project.run.glob("package/**/tensorrt_llm/config.pbtxt")).parent
    config = parse_config((folder / "config.pbtxt").read_text(), "config.pbtxt")
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    return load_model(folder, parameters | {"interpreter_mode": "exact", "runner": "interpreter"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_from_the_hub_to_tokens(kind: str, tmp_path: Path) -> None:
    project = write_project(tmp_path / "run", fixtures.deepseek_v2(tmp_path / "hf", tokenizer=True))
    gpu = "L40S" if kind == "fp8" else "A100-80GB"
    sets = [f"stages.quantize.kv_cache={kind}", "stages.quantize.method=rtn", f"target.gpu={gpu}", PLUGINS]
    result = project.trtseek("engine", "tiny.yaml", *(word for each in sets for word in ("--set", each)))
    assert result.returncode == 0, result.stderr
    proof = json.loads((project.run / "verify/verify.json").read_text())
    gates = {gate["name"]: gate["passed"] for gate in proof["gates"]}
    assert gates["network_exact"] and gates["lowerings_agree"] and gates["network_cache"]
    assert proof["network"]["cache"]["kind"] == kind
    engine = json.loads((project.run / "build/engine.json").read_text())
    assert {tensor["dtype"] for tensor in engine["inputs"] if "_pool_" in tensor["name"]} == {kind}
    assert engine["network_digest"] == proof["network_digest"]
    loaded = load(project)
    together = generate(loaded.runner, [[5, 9, 77], [31, 8, 8, 250, 4]], 6, block_size=16)
    assert together == [
        generate(loaded.runner, [prompt], 6, block_size=16)[0] for prompt in ([5, 9, 77], [31, 8, 8, 250, 4])
    ]
    assert all(pool.nbytes == pool.numel() for pool in loaded.runner.pools.values())


def test_it_is_refused_where_it_would_be_native(tmp_path: Path) -> None:
    project = write_project(tmp_path / "run", fixtures.llama(tmp_path / "hf", tokenizer=True))
    result = project.trtseek("validate", "tiny.yaml", "--set", "stages.quantize.kv_cache=int8")
    assert result.returncode == 4
    assert "a KV cache in int8 is written and read by the plugins" in result.stderr
    assert "set stages.build.lowering.rope_paged_kv and paged_attention: plugin" in result.stderr
