"""Rounding to nearest, made while it is read, is what the quantize stage writes by rtn; its part in comparisons."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import CheckpointError
from pipeline.evaluation.baseline import make_baseline
from pipeline.evaluation.comparison import Plan, compare_subjects
from pipeline.evaluation.scores import SUMS
from pipeline.evaluation.subject import Subject, describe_subject
from pipeline.progress import SILENT
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.evaluation.support import convert
from tests.quantization.support import CalibrationSettings, Settings


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("baseline")
    (folder / "text.txt").write_text("a quick brown fox jumps over 13 lazy dogs\n" * 90)
    source = fixtures.deepseek_v2(folder / "hf", tokenizer=True, num_hidden_layers=2)
    return describe_subject(convert(source, folder / "engine", "bfloat16"), "original")


def quantize(original: Subject, method: str, **changes: object) -> Subject:
    root = original.folder.path.parent
    calibration = CalibrationSettings(files=(root / "text.txt",), samples=4, length=16)
    settings = dataclasses.replace(
        Settings(method=method, group_size=32, calibration=calibration, unrouted_experts="share_scale"),
        **changes,  # type: ignore[arg-type]
    )
    folder = root / "-".join((method, *map(str, changes.values())))
    if not folder.exists():
        quantize_checkpoint(original.folder, FolderWorkspace(folder), settings=settings)
    return describe_subject(CheckpointFolder.open(folder), method)


@pytest.mark.parametrize(
    ("method", "nearest"), [("awq", "rtn"), ("gptq", "rtn"), ("awq_fp8", "rtn"), ("smoothquant", "int8")]
)
def test_the_same_tensors_as_the_method_that_rounds(original: Subject, method: str, nearest: str) -> None:
    quantized = quantize(original, method)
    baseline = make_baseline(original, quantized)
    written = quantize(original, nearest).source
    assert baseline is not None and baseline.label == f"to nearest as {quantized.label} (baseline)"
    assert dict(baseline.source.tensors) == dict(written.tensors)
    for name in sorted(written.tensors, reverse=True):  # in no order of a file's
        assert torch.equal(baseline.source.read(name).to_torch(), written.read(name).to_torch()), name


def test_an_original_of_another_type_is_rounded_in_the_quantized_checkpoint_s(
    original: Subject, tmp_path: Path
) -> None:
    awq, rtn = quantize(original, "awq"), quantize(original, "rtn")
    other = describe_subject(convert(original.folder.path.parent / "hf", tmp_path / "engine", "float32"), "other")
    baseline = make_baseline(other, awq)
    assert baseline is not None and baseline.dtype == "bfloat16"
    assert dict(baseline.source.tensors) == dict(rtn.source.tensors)
    for name in rtn.source.tensors:
        found, expected = (source.read(name).to_torch().float() for source in (baseline.source, rtn.source))
        assert torch.equal(found, expected), name
    plan = Plan(files=[original.folder.path.parent / "text.txt"], tokens=64, window=32)
    assert compare_subjects([other, awq], plan, SILENT).baseline is not None


def test_fp8_keeps_its_inputs_and_the_cache_its_range(original: Subject) -> None:
    """The weights to nearest by torch's own cast, in steps of the largest over 448."""
    quantized = quantize(original, "fp8", kv_cache="fp8")
    baseline = make_baseline(original, quantized)
    assert baseline is not None and baseline.kv_cache == "fp8"
    assert baseline.source.tensors.keys() == quantized.source.tensors.keys()
    differing = set()
    for name in quantized.source.tensors:
        found, theirs = (source.read(name).to_torch().float() for source in (baseline.source, quantized.source))
        if name.replace("weight", "activation_scaling_factor") in quantized.source.tensors and name.endswith("weight"):
            weight = original.source.read(name).to_torch().float()
            step = weight.abs().max() / 448
            torch.testing.assert_close(found, (weight / step).to(torch.float8_e4m3fn).float(), rtol=0.13, atol=1e-2)
            differing.add(name)
        elif "weights_scaling_factor" not in name:
            assert torch.equal(found, theirs), name
    assert differing


def test_its_part_in_a_comparison(original: Subject, tmp_path: Path) -> None:
    awq, rtn = quantize(original, "awq"), quantize(original, "rtn")
    plan = Plan(files=[original.folder.path.parent / "text.txt"], tokens=128, window=32)
    found = compare_subjects([original, awq], plan, SILENT)
    expected = compare_subjects([original, rtn], plan, SILENT)
    assert found.baseline is not None and expected.baseline is None  # rtn is its own
    assert torch.equal(found.baseline.tally.sums, expected.quality[1].tally.sums)
    document, (first, second) = found.to_json(), found.quality
    assert document["baseline"]["perplexity"] == expected.quality[1].tally.perplexity
    losses = [math.log(each.tally.perplexity / first.tally.perplexity) for each in (second, found.baseline)]
    share = losses[0] / losses[1] if losses[1] > 0 else None
    assert document["checkpoints"][1]["baseline_share"] == (pytest.approx(share) if share else None)
    first.tally.sums[:, SUMS.index("nll")] += 1e6  # a perplexity beyond all numbers
    assert math.isinf(first.tally.perplexity) and found.to_json()["checkpoints"][0]["perplexity"] == math.inf
    assert compare_subjects([original, awq], dataclasses.replace(plan, baseline=False), SILENT).baseline is None
    beside = compare_subjects([original, awq, original], plan, SILENT).baseline  # the last one has none of its own
    assert beside is not None and torch.equal(beside.tally.sums, found.baseline.tally.sums)


def test_there_is_none_of_what_others_made_or_of_what_is_rounded_already(original: Subject) -> None:
    awq = quantize(original, "awq")
    assert make_baseline(original, original) is None
    assert make_baseline(awq, awq) is None
    assert make_baseline(original, quantize(original, "int8")) is None


def test_a_report_of_another_s_is_not_read_and_a_damaged_one_is_named(original: Subject, tmp_path: Path) -> None:
    awq = quantize(original, "awq")
    for file in awq.folder.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    report = tmp_path / "quantization.json"
    for text in ("[]", "{}", '{"bits": 4}', "{"):
        report.write_text(text)
        with pytest.raises(CheckpointError, match=r"quantization\.json is not what the quantize stage writes"):
            make_baseline(original, describe_subject(CheckpointFolder.open(tmp_path), "damaged"))
    hub = dataclasses.replace(awq, folder=CheckpointFolder.open(original.folder.path.parent / "hf"))
    (hub.folder.path / "quantization.json").write_text('{"bits": 4}')
    assert make_baseline(original, hub) is None


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("method", "nvfp4_awq", "awq, "),
        ("method", 7, "awq, "),
        ("method", ["awq"], "awq, "),
        ("format", "nvfp4", "int4, "),
        ("group_size", 16, "128, 64, 32"),
        ("group_size", None, "128, 64, 32"),
    ],
)
def test_what_another_version_wrote_is_named(
    original: Subject, tmp_path: Path, key: str, value: object, known: str
) -> None:
    """Of a linear's row: the file, the linear, the key, its value and those that are known."""
    folder = tmp_path / "newer"
    shutil.copytree(quantize(original, "awq").folder.path, folder)
    report = json.loads((folder / "quantization.json").read_text())
    name = list(report["linears"])[-1]
    report["linears"][name][key] = value
    (folder / "quantization.json").write_text(json.dumps(report))
    told = rf"newer/quantization\.json: linears: {re.escape(name)}: {key} is {re.escape(repr(value))}; .* knows {known}"
    with pytest.raises(CheckpointError, match=told) as caught:
        make_baseline(original, describe_subject(CheckpointFolder.open(folder), "newer"))
    assert "the version of trtseek that wrote it" in caught.value.hint
