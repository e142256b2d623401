"""A model over two GPUs through `trtseek engine`: proved together, an engine each, one package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.engine.description import load_description
from tests import fixtures
from tests.end_to_end.support import write_project


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["{tensor: 2}", "{tensor: 2, expert: 2}", "{pipeline: 2}"])
def test_from_one_checkpoint_to_an_engine_for_each_rank(parallel: str, tmp_path: Path) -> None:
    source = fixtures.deepseek_v2(tmp_path / "hf", tokenizer=True)
    project = write_project(tmp_path / "run", source)
    result = project.trtseek("engine", "tiny.yaml", "--set", f"target.parallel={parallel}")
    assert result.returncode == 0, result.stderr
    proof = json.loads((project.run / "verify/verify.json").read_text())
    assert len(proof["rank_digests"]) == 2
    assert proof["network"]["ranks"]["max_logit_error"] < 1e-4
    engine = load_description(project.run / "build")
    assert [rank.network_digest for rank in engine.all_ranks] == proof["rank_digests"]
    for rank in engine.all_ranks:
        assert (project.run / "build" / rank.file).stat().st_size == rank.nbytes
    manifest = json.loads((project.run / "package/manifest.json").read_text())
    assert manifest["engine_digest"] == engine.set_digest
