"""A model that another tool has quantized: what cannot be done with it is refused before any work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.checkpoint.checked_headers import read_checked, remember
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.config.compatibility import check_compatibility
from pipeline.config.load import load_config
from pipeline.errors import CompatibilityError
from pipeline.exports.formats import export_checkpoint
from pipeline.workspace import FolderWorkspace
from tests.checkpoint.foreign.cases import CASES, write
from tests.end_to_end.support import write_project

NONE = "stages.quantize.method=none"
LLM = ("target.gpu=H100", "target.backend=tensorrt_llm")
PYTORCH = ("target.gpu=H100", "target.backend=llmapi")


def check(source: Path, *settings: str) -> tuple[str, ...]:
    project, memory = source.parent / "project", source.parent / "memory"
    write_project(project, source)
    config = load_config(project / "tiny.yaml", list(settings))
    headers = read_checked(source, memory, config.stages.convert.dtype)
    remember(source, memory, headers)
    return check_compatibility(config, headers.architecture, headers.tensors, headers.holding)


@pytest.mark.parametrize("name", ["awq", "gptq", "modelopt-int4", "compressed-int4", "compressed-int8-static"])
def test_what_is_quantized_is_not_quantized_again(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    settings = [f"stages.convert.dtype={dict(CASES[name].options).get('dtype', 'null')}"]
    with pytest.raises(CompatibilityError, match=r"stages\.quantize.*: the model is quantized already") as caught:
        check(path, *settings)
    assert "stages.quantize.method: none" in caught.value.hint
    for _ in range(2):  # once more from what is remembered
        check(path, NONE, *settings)


def test_fp8_wants_a_gpu_that_has_it(tmp_path: Path) -> None:
    path = write("compressed-fp8-dynamic", tmp_path)
    for dtype in ("null", "float16"):
        with pytest.raises(CompatibilityError, match="need FP8 tensor cores, SM89 or later; the A100-80GB is SM80"):
            check(path, NONE, f"stages.convert.dtype={dtype}")
        check(path, NONE, f"stages.convert.dtype={dtype}", "target.gpu=L40S")


HALF, OWN = "stages.convert.dtype=float16", "stages.convert.dtype=null"
# A case, settings that are refused, what is said, and settings that are not.
REFUSED = [
    ("awq-whole-rows", (HALF, "target.parallel.tensor=2"),
     r"tensor parallel size 2 does not divide the model's \d groups of 128 inputs of transformer\.layers", (HALF,)),
    ("awq-zero-points", (HALF,), "15 of 15 linears .* transformer.layers.0.attention.qkv has zero points",
     (HALF, "stages.convert.foreign=dequantize")),
    ("gptq-act-order", (HALF,), "groups scattered over the inputs", (HALF, "stages.convert.foreign=dequantize")),
    ("awq-bfloat16", (OWN,), "float16 scales that are none of bfloat16", (HALF,)),
    ("compressed-int4-small-groups", (OWN,), "has groups of 16", (OWN, "stages.convert.foreign=dequantize")),
    ("awq", (HALF, *LLM, "target.gpu=B200"), "int4 on SM100: INT8 and INT4 are what TensorRT-LLM's builder refuses",
     (HALF, *LLM)),
    ("awq", (HALF, "target.gpu=T4"), "tensorrt_rtx builds INT4 weights for SM80 and later", (HALF,)),
    ("gptq-v2", (HALF, *LLM), "attention.qkv is INT4 in groups of 32: its kernels have 64 and 128", (HALF,)),
    ("gptq-moe", (HALF, *LLM), "is int4: its MoE models take 16 bits and FP8", (HALF,)),
    ("modelopt-fp8", (OWN, *LLM), r"attention\.qkv is FP8 with a scale for each output, or for q, k and v each",
     (OWN, *PYTORCH)),
    ("compressed-fp8-dynamic", (OWN, *LLM), "is FP8 with a scale for each output", (OWN, "target.gpu=L40S")),
    ("compressed-fp8-dynamic", (OWN, *PYTORCH),
     r"attention\.qkv cannot be exported as modelopt: its FP8 weights have no static scale of their input",
     (OWN, "target.gpu=L40S")),
    ("compressed-fp8-rows-static", (OWN, *PYTORCH),
     r"attention\.\w+ cannot be exported as modelopt: its FP8 weights have a scale for each output",
     (OWN, "target.gpu=L40S")),
    ("compressed-fp8-static", (OWN, *LLM), "scale for each output", (OWN, *PYTORCH)),
    ("compressed-fp8-blocks", (OWN, *LLM), "is FP8 in 128 x 128 blocks", (OWN, *PYTORCH)),
    ("modelopt-int8", (OWN, *PYTORCH), "int8_sq is not exported to what the PyTorch backend reads", (OWN, *LLM)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "refused", "message", "taken"), REFUSED)
def test_what_no_stage_could_do(
    name: str, refused: tuple[str, ...], message: str, taken: tuple[str, ...], tmp_path: Path
) -> None:
    path = write(name, tmp_path)
    with pytest.raises(CompatibilityError, match=message) as caught:
        check(path, NONE, *refused)
    assert "quantize its 16-bit weights" in caught.value.hint
    check(path, NONE, *taken)


@pytest.mark.parametrize("name", ["compressed-fp8-rows-static", "compressed-fp8-dynamic"])
def test_what_validate_refuses_the_export_would_refuse_in_the_same_words(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    convert_checkpoint(CheckpointFolder.open(path), FolderWorkspace(tmp_path / "c"), dtype=None, overflow="refuse")
    with pytest.raises(CompatibilityError) as built:
        export_checkpoint(CheckpointFolder.open(tmp_path / "c"), tmp_path / "out", "modelopt")
    with pytest.raises(CompatibilityError) as checked:
        check(path, NONE, OWN, *PYTORCH)
    assert checked.value.message.partition("cannot be")[1:] == built.value.message.partition("cannot be")[1:]


def test_what_holds_the_linears_is_remembered_for_one_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("awq-bfloat16", tmp_path)
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))  # what is young is not remembered
    check(path, NONE, HALF)
    with pytest.raises(CompatibilityError, match="none of bfloat16"):
        check(path, NONE, OWN)  # read anew
    check(path, NONE, HALF)
    monkeypatch.setattr(CheckpointFolder, "open", None)
    check(path, NONE, HALF)
