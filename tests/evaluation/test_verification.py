"""All three proofs together on shipped-like checkpoints, and what the summary says."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.config.proof import Context, Continuations, Gates, HeldOut, Verify
from pipeline.evaluation import proofs as proof_module
from pipeline.evaluation.comparison import Comparison
from pipeline.evaluation.judgement import judge_quality
from pipeline.evaluation.measurement import LayerTally, Measure
from pipeline.evaluation.network_findings import find_worst
from pipeline.evaluation.proofs import prove
from pipeline.evaluation.scores import Tally
from pipeline.evaluation.verification import Verification, judge
from pipeline.network.spec import NetworkSpec
from pipeline.progress import SILENT
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.evaluation.support import convert

QUALITY = [Measure(label, Tally((16,)), LayerTally.of(2)) for label in ("original", "quantized")]
SPEC = NetworkSpec(dtype="float16", max_seq_len=128, block_size=8)
GATES = Gates(
    perplexity_ratio=None,
    top1_agreement=0.999,
    mean_kl=1e-6,
    top5_overlap=0.999,
    layer_error=1e-6,
    context_kl=1e-6,
    accuracy_drop=1.0,
)


class KilledError(Exception): ...


def kill(*_: object, **__: object) -> None:
    raise KilledError


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `prove` wrote; a killed run had been at the quality."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "heldout.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    (folder / "tasks.jsonl").write_text(
        '{"prompt": "The", "choices": [" dog", " fox"], "answer": 0}\n', encoding="utf-8"
    )
    source = fixtures.deepseek_v2(folder / "hf", tokenizer=True, num_hidden_layers=2)
    converted = convert(source, folder / "engine", "float16")
    from pipeline.config.settings import Quantize

    quantize_checkpoint(converted, FolderWorkspace(folder / "int4"), settings=Quantize(method="rtn", group_size=32))
    settings = Verify(
        prompts=("def f(x):", "A tensor is a"),
        heldout=HeldOut(files=(folder / "heldout.txt",), tokens=256, window=64),
        context=Context(lengths=(32, 96)),
        tasks=(folder / "tasks.jsonl",),
        continuations=Continuations(prompts=2, tokens=8),
    )
    subjects = CheckpointFolder.open(source), converted, CheckpointFolder.open(folder / "int4")

    def run() -> None:
        prove(*subjects, SPEC, settings, FolderWorkspace(folder / "proofs", journal=folder / "journal"), SILENT)

    with pytest.MonkeyPatch.context() as killed:
        killed.setattr(proof_module, "compare_subjects", kill)
        with pytest.raises(KilledError):
            run()
    with pytest.MonkeyPatch.context() as finished:
        for name in ("prove_conversion", "prove_network"):
            finished.setattr(proof_module, name, lambda *_, **__: pytest.fail("proved again"))
        run()
    return folder / "proofs"


@pytest.fixture(scope="module")
def verified(proofs: Path) -> Verification:
    return judge(proofs, GATES)


def test_proofs_pass_and_quality_gates_judge(verified: Verification) -> None:
    passed = {gate.name: gate.passed for gate in verified.gates}
    assert passed == {
        "conversion": True,
        "network_exact": True,
        "network_declared": True,
        "perplexity_ratio": None,  # turned off: skipped, never passed
        "top1_agreement": False,
        "mean_kl": False,
        "top5_overlap": False,
        "layer_error": False,
        "context_kl@32": False,
        "context_kl@96": False,
        "context_entropy@32": None,
        "context_entropy@96": None,
        "accuracy_drop": True,
    }
    assert verified.quality is not None
    blame = next(gate.blame for gate in verified.gates if gate.name == "mean_kl")
    errors = [row["error"] for row in verified.quality["checkpoints"][1]["layers"]]
    assert blame == f"worst layer: {find_worst(errors)}"


def test_values_are_those_of_the_measurement(verified: Verification) -> None:
    assert verified.quality is not None
    original, quantized = verified.quality["checkpoints"]
    values = {gate.name: gate.value for gate in verified.gates}
    assert values["perplexity_ratio"] == quantized["perplexity"] / original["perplexity"]
    assert values["layer_error"] == max(row["error"] for row in quantized["layers"])
    ours, theirs = original["context"], quantized["context"]
    assert values["context_kl@96"] == theirs[1]["kl"]
    assert values["context_entropy@32"] == abs(theirs[0]["entropy"] - ours[0]["entropy"])
    shares = [row["accuracy"]["accuracy"] for row in (original, quantized)]
    assert values["accuracy_drop"] == shares[0] - shares[1]


def test_the_worst_prompts_are_continued_side_by_side(verified: Verification) -> None:
    assert verified.quality is not None
    samples = verified.quality["samples"]
    assert len(samples) == 2
    assert samples[0]["kl"] == verified.quality["checkpoints"][1]["max_kl"] >= samples[1]["kl"]
    for sample in samples:
        original, quantized = sample["continuations"]
        assert (original["label"], quantized["label"]) == ("original", "quantized")
        assert original["first_difference"] is None
        assert quantized["text"].startswith(quantized["agreed"])


def test_a_gate_that_nothing_measures_is_skipped_and_a_bound_on_it_is_refused(tmp_path: Path) -> None:
    nothing_more = Comparison(sizes=[1, 1], quality=QUALITY, drift=[], accuracy=[], samples=[]).to_json()
    gates = list(judge_quality(Gates(), nothing_more))
    unmeasured = {gate.name: (gate.value, gate.passed) for gate in gates if gate.value is None}
    assert unmeasured == dict.fromkeys(("context_kl", "context_entropy", "accuracy_drop"), (None, None))
    assert all(gate.describe().startswith("skip") for gate in gates if gate.value is None)
    for bounds in ({"context_kl": 0.1}, {"context_entropy": 0.1}, {"accuracy_drop": 0.0}):
        with pytest.raises(ValidationError, match=r"is empty: nothing of it is measured"):
            Verify(gates=Gates(**bounds))  # type: ignore[arg-type]


def test_the_record_is_json_and_the_summary_has_a_line_per_gate_and_layer(verified: Verification) -> None:
    record = json.loads(json.dumps(verified.to_json(), allow_nan=False))
    assert record["network_digest"].startswith("blake3:")
    assert len(record["quality"]["checkpoints"][1]["layers"]) == 2
    summary = verified.summarize()
    assert summary.count("FAIL") == 6
    assert summary.count("skip") == 3
    assert verified.network_digest in summary


def test_a_network_that_is_not_finite_has_its_report_too(proofs: Path, tmp_path: Path) -> None:
    shutil.copytree(proofs, tmp_path / "proofs")
    network = json.loads((proofs / "network.json").read_text())
    broken = network | {"max_logit_error": "inf", "layer_errors": [1e-7, "nan"]}
    (tmp_path / "proofs" / "network.json").write_text(json.dumps(broken))
    judged = judge(tmp_path / "proofs", GATES)
    record = json.loads(json.dumps(judged.to_json(), allow_nan=False))
    assert record["network"]["max_logit_error"] == "inf"
    assert record["network"]["layer_errors"] == [1e-7, "nan"]
    assert judged.network.worst_layer == 1
    gate = next(gate for gate in judged.gates if gate.name == "network_exact")
    assert (gate.value, gate.passed) == (math.inf, False) and "worst layer: 1" in gate.blame
    assert "inf" in judged.summarize()
