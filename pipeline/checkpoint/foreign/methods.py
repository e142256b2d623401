"""Whose a quantized checkpoint is, by what its config.json says, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.engine_config import QUANTIZATION_KEY
from pipeline.checkpoint.foreign.awq import read_awq
from pipeline.checkpoint.foreign.compressed_tensors import read_compressed_tensors
from pipeline.checkpoint.foreign.gptq import read_gptq
from pipeline.checkpoint.foreign.modelopt import read_modelopt
from pipeline.checkpoint.foreign.settings import Settings
from pipeline.checkpoint.shard_index import CONFIG
from pipeline.checkpoint.strict_json import read_json
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.foreign.headers import Headers
    from pipeline.checkpoint.foreign.linear import ForeignLinear

# quant_method -> the reader of one linear. What `fp8` means is DeepSeek's own: see checkpoint/block_scales.py.
READERS: dict[str, Callable[[Settings, Headers, str], ForeignLinear | None]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
}
MODELOPT, MODELOPT_FILE = "modelopt", "hf_quant_config.json"


def find_method(folder: CheckpointFolder) -> str | None:
    """Who quantized the checkpoint: a key of READERS; None where nobody did, or DeepSeek in FP8 blocks."""
    return name_method(folder.path, folder.config)


def name_method(path: Path, config: Mapping[str, Any]) -> str | None:
    """The same of a folder that need not be opened, by its config.json."""
    stated = config.get(QUANTIZATION_KEY)
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    if stated is None and (path / MODELOPT_FILE).is_file():
        return MODELOPT
    return method if isinstance(method, str) and method in READERS else None


def find_settings(folder: CheckpointFolder, method: str) -> Settings:
    """What the checkpoint says of its quantization: modelopt in a file of its own, where it is there."""
    path = folder.path / MODELOPT_FILE
    if method == MODELOPT and path.is_file():
        values = read_json(path).get("quantization")
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: quantization must be a mapping", hint="copy it again from the model")
        return Settings(values, str(path), "quantization.")
    return Settings(folder.config[QUANTIZATION_KEY], str(folder.path / CONFIG))
