"""An engine checkpoint's own key: read as it was written, refused by name where others wrote it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.own_key import OwnKey, parse_own_key
from pipeline.errors import CheckpointError
from pipeline.workspace import FolderWorkspace

WRITTEN: dict[str, Any] = {"format": 1, "dtype": "bfloat16", "quantization": None}
QUANTIZATION: dict[str, Any] = {
    "method": "awq",
    "kv_cache_quant_algo": "FP8",
    "quantized": {"lm_head": {"format": "int8", "group_size": None}},
}


def test_what_is_said() -> None:
    assert parse_own_key({}, "config.json") is None
    assert parse_own_key({"trtseek": WRITTEN}, "config.json") == OwnKey(
        dtype="bfloat16", quantization=None, stated=None
    )
    own = parse_own_key({"trtseek": {**WRITTEN, "quantization": QUANTIZATION}}, "config.json")
    assert own is not None and own.quantization == QUANTIZATION and own.kv_cache == "fp8"


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({**WRITTEN, "format": 2}, "trtseek: format is 2; this version reads 1"),
        ({"dtype": "bfloat16"}, "trtseek: format is None; this version reads 1"),
        ({**WRITTEN, "dtype": "float8"}, "trtseek: dtype is 'float8'; this version reads float32, float16, bfloat16"),
        ({**WRITTEN, "dtype": ["float16"]}, "trtseek: dtype is ['float16']; "),
        ({**WRITTEN, "stated_dtype": "float16"}, "trtseek.stated_dtype is 'float16', not an object"),
        ({**WRITTEN, "quantization": "awq"}, "trtseek.quantization is 'awq', not an object"),
        (
            {**WRITTEN, "quantization": QUANTIZATION | {"kv_cache_quant_algo": "NVFP4"}},
            "trtseek: kv_cache_quant_algo is 'NVFP4'; this version reads null, FP8, INT8",
        ),
        (
            {**WRITTEN, "quantization": QUANTIZATION | {"quantized": ["lm_head"]}},
            "trtseek.quantization.quantized is ['lm_head'], not an object",
        ),
        (
            {**WRITTEN, "quantization": QUANTIZATION | {"quantized": {"lm_head": "int8"}}},
            "trtseek.quantization.quantized: lm_head is 'int8', not an object",
        ),
        ("engine", "trtseek is 'engine', not an object"),
    ],
)
def test_what_another_version_wrote_is_named(own: Any, told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_own_key({"trtseek": own}, "out/quantize/config.json")
    assert caught.value.message.startswith(f"out/quantize/config.json: {told}")
    assert "the version of trtseek that wrote it" in caught.value.hint


def test_a_folder_of_another_version_is_not_opened(llama_path: Path, tmp_path: Path) -> None:
    """Whatever is to be done with it: every reader opens it the same way."""
    convert_checkpoint(
        CheckpointFolder.open(llama_path), FolderWorkspace(tmp_path / "engine"), dtype=None, overflow="refuse"
    )
    shutil.copytree(tmp_path / "engine", tmp_path / "newer")
    config = json.loads((tmp_path / "newer/config.json").read_text())
    config["trtseek"]["format"] = 2
    (tmp_path / "newer/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"newer/config\.json: trtseek: format is 2; this version reads 1"):
        CheckpointFolder.open(tmp_path / "newer")
    assert CheckpointFolder.open(llama_path).own is None
    opened = CheckpointFolder.open(tmp_path / "engine").own
    assert opened is not None and (opened.dtype, opened.kv_cache) == ("bfloat16", "model")
