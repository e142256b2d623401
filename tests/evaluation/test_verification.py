"""All three proofs together on shipped-like checkpoints, and what the summary says."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.config.settings import Gates, HeldOut, Verify
from pipeline.evaluation.verification import Verification, verify
from pipeline.network.spec import NetworkSpec
from pipeline.progress import SILENT
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.evaluation.support import convert

SPEC = NetworkSpec(dtype="float16", max_seq_len=128, block_size=8)


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Verification:
    folder = tmp_path_factory.mktemp("verify")
    (folder / "heldout.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    source = fixtures.deepseek_v2(folder / "hf", tokenizer=True, num_hidden_layers=2)
    converted = convert(source, folder / "engine", "float16")
    from pipeline.config.settings import Quantize

    quantize_checkpoint(converted, FolderWorkspace(folder / "int4"), settings=Quantize(method="rtn", group_size=32))
    settings = Verify(
        prompts=("def f(x):", "A tensor is a"),
        heldout=HeldOut(files=(folder / "heldout.txt",), tokens=256, window=64),
        gates=Gates(perplexity_ratio=None, top1_agreement=0.999, mean_kl=1e-6),
    )
    return verify(
        CheckpointFolder.open(source), converted, CheckpointFolder.open(folder / "int4"), SPEC, settings, SILENT
    )


def test_proofs_pass_and_quality_gates_judge(verified: Verification) -> None:
    passed = {gate.name: gate.passed for gate in verified.gates}
    assert passed == {
        "conversion": True,
        "network_exact": True,
        "network_declared": True,
        "perplexity_ratio": None,  # turned off: skipped, never passed
        "top1_agreement": False,
        "mean_kl": False,
    }
    assert verified.quality is not None
    blame = next(gate.blame for gate in verified.gates if gate.name == "mean_kl")
    assert blame == f"worst layer: {verified.quality.worst_layer}"


def test_the_record_is_json_and_the_summary_has_a_line_per_gate_and_layer(verified: Verification) -> None:
    record = json.loads(json.dumps(verified.to_json(), allow_nan=False))
    assert record["network_digest"].startswith("blake3:")
    assert len(record["quality"]["layer_error"]) == 2
    summary = verified.summarize()
    assert summary.count("FAIL") == 2
    assert summary.count("skip") == 1
    assert verified.network_digest in summary


def test_a_network_that_is_not_finite_has_its_report_too(verified: Verification) -> None:
    broken = dataclasses.replace(verified.network, max_logit_error=math.inf, layer_errors=[1e-7, math.nan])
    record = dataclasses.replace(verified, network=broken).to_json()
    network = json.loads(json.dumps(record, allow_nan=False))["network"]
    assert network["max_logit_error"] == "inf"
    assert network["layer_errors"] == [1e-7, "nan"]
    assert broken.worst_layer == 1
