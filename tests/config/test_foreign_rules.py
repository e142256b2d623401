"""A model that another tool has quantized is refused a second quantization, and FP8 where the GPU has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checkpoint.checked_headers import read_checked, remember
from pipeline.config.compatibility import check_compatibility
from pipeline.config.load import load_config
from pipeline.errors import CompatibilityError
from tests.checkpoint.foreign.cases import write
from tests.end_to_end.support import write_project

NONE = "stages.quantize.method=none"


def check(source: Path, *settings: str) -> tuple[str, ...]:
    project, memory = source.parent / "project", source.parent / "memory"
    write_project(project, source)
    config = load_config(project / "tiny.yaml", list(settings))
    headers = read_checked(source, memory)
    remember(source, memory, headers)
    return check_compatibility(config, headers.architecture, headers.tensors)


@pytest.mark.parametrize("name", ["awq", "gptq", "modelopt-int4", "compressed-int4", "compressed-int8-static"])
def test_what_is_quantized_is_not_quantized_again(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    with pytest.raises(CompatibilityError, match=r"stages\.quantize.*: the model is quantized already") as caught:
        check(path)
    assert "stages.quantize.method: none" in caught.value.hint
    for _ in range(2):  # once more from what is remembered
        assert any("counts its linears in 16 bits" in note for note in check(path, NONE))


def test_fp8_wants_a_gpu_that_has_it(tmp_path: Path) -> None:
    path = write("compressed-fp8-dynamic", tmp_path)
    for dtype in ("null", "float16"):
        with pytest.raises(CompatibilityError, match="need FP8 tensor cores, SM89 or later; the A100-80GB is SM80"):
            check(path, NONE, f"stages.convert.dtype={dtype}")
        check(path, NONE, f"stages.convert.dtype={dtype}", "target.gpu=L40S")


def test_integers_on_blackwell_are_refused_before_they_are_converted(tmp_path: Path) -> None:
    awq, fp8 = write("awq", tmp_path / "awq"), write("compressed-fp8-static", tmp_path / "fp8")
    settings = (NONE, "target.gpu=B200", "target.backend=tensorrt_llm", "stages.convert.dtype=float16")
    with pytest.raises(CompatibilityError, match=r"\.qweight is INT4 or INT8, which TensorRT-LLM's builder refuses"):
        check(awq, *settings)
    check(awq, *settings, "stages.convert.foreign=dequantize")
    check(awq, *settings, "target.gpu=H100")
    check(fp8, *settings)
