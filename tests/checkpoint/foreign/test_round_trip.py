"""What one of ours is exported as comes back as it was; a foreign checkpoint can be compared without converting it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.config.schema import Quantize
from pipeline.errors import CheckpointError
from pipeline.evaluation.subject import open_subject
from pipeline.exports.formats import export_checkpoint
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests.checkpoint.foreign.cases import write
from tests.checkpoint.foreign.test_convert import convert


def assert_same_tensors(one: CheckpointFolder, other: CheckpointFolder) -> None:
    assert dict(one.tensors) == dict(other.tensors)
    for name in one.tensors:
        assert one.read(name).data.tobytes() == other.read(name).data.tobytes(), name


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("awq", "awq"),
        ("gptq-moe", "compressed_tensors"),
        ("modelopt-int4", "modelopt"),
        ("compressed-int8-static", "compressed_tensors"),
        ("compressed-fp8-static", "compressed_tensors"),
        ("compressed-fp8-dynamic", "compressed_tensors"),
        ("compressed-fp8-blocks", "compressed_tensors"),
        ("modelopt-fp8", "modelopt"),
    ],
)
def test_an_export_of_it_comes_back_byte_for_byte(name: str, format: str, tmp_path: Path) -> None:
    engine, _ = convert(write(name, tmp_path), tmp_path / "engine")
    export_checkpoint(engine, tmp_path / "exported", format)
    again, report = convert(tmp_path / "exported", tmp_path / "again")
    assert report.foreign is not None and report.foreign["widened"] == {}
    assert_same_tensors(engine, again)


def test_the_quantize_stage_does_not_round_it_again(tmp_path: Path) -> None:
    engine, _ = convert(write("awq", tmp_path), tmp_path / "engine")
    settings = Quantize(method="rtn", kv_cache="none")
    workspace = FolderWorkspace(tmp_path / "twice", journal=tmp_path / "journal")
    with pytest.raises(CheckpointError, match="is quantized already") as caught:
        quantize_checkpoint(engine, workspace, settings=settings)
    assert "stages.quantize.method: none" in caught.value.hint
    assert not list((tmp_path / "twice").glob("*"))


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "modelopt-fp8", "compressed-fp8-dynamic"])
def test_it_is_read_as_the_engine_checkpoint_that_it_would_be(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    engine, _ = convert(path, tmp_path / "engine", foreign="dequantize")
    subject = open_subject(path)
    assert subject.dtype == engine.architecture.dtype
    assert dict(subject.source.tensors) == dict(engine.tensors)
    for tensor in engine.tensors:
        one, other = subject.source.read(tensor).to_torch(), engine.read(tensor).to_torch()
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), tensor
