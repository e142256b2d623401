"""The engine checkpoint's config.json: the source's own text with the weights' type and one key of ours.

Not a character more changes, so that an export gives the source's file back.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.json_text import remove_key, set_keys
from pipeline.checkpoint.layouts.scales import BLOCK
from pipeline.checkpoint.layouts.scales import CONFIG_KEY as FP8_KEY
from pipeline.checkpoint.own_key import FORMAT, OWN_KEY, STATED_KEY, OwnKey
from pipeline.checkpoint.shard_index import CONFIG
from pipeline.errors import CheckpointError

QUANTIZATION_KEY = "quantization_config"  # the hub's, of weights that are not plain floats
TYPE_KEYS = ("torch_dtype", "dtype")  # the hub's, and transformers 5's


def write_converted(
    source: CheckpointFolder, folder: Path, dtype: str, *, is_cast: bool, has_fp8: bool, keeps_fp8: bool
) -> Path:
    """`dtype` in torch's spelling. `is_cast`: whether any weight changed its type. What the source says of FP8 goes
    where the FP8 went."""
    own: dict[str, Any] = {"format": FORMAT, "dtype": dtype, "quantization": None}
    if keeps_fp8:
        own[FP8_KEY] = [BLOCK, BLOCK]
    stated = {key: source.config[key] for key in TYPE_KEYS if key in source.config}
    types = dict.fromkeys(stated or TYPE_KEYS[:1], dtype)
    if types != stated and not is_cast:
        own[STATED_KEY] = stated
    text = _read_text(source)
    if has_fp8 and not keeps_fp8:
        text = remove_key(text, QUANTIZATION_KEY)
    return _write_text(folder, set_keys(text, types | {OWN_KEY: own}))


def write_quantized(source: CheckpointFolder, folder: Path, quantization: Mapping[str, Any], *, has_fp8: bool) -> Path:
    """`source` is the unquantized engine checkpoint; `has_fp8`: whether any weight in FP8 blocks is left."""
    own = {key: value for key, value in source.config[OWN_KEY].items() if key != FP8_KEY}
    if has_fp8:
        own[FP8_KEY] = [BLOCK, BLOCK]
    return _write_text(folder, set_keys(_read_text(source), {OWN_KEY: {**own, "quantization": quantization}}))


def write_exported(engine: CheckpointFolder, folder: Path, quantization: Mapping[str, Any] | None) -> Path:
    """The source's own config.json again, where its weights' type is too; else that with their type. `quantization`:
    the quantization_config that goes with the exported weights, the source's own where it is the same."""
    text = remove_key(_read_text(engine), OWN_KEY)
    stated = engine.own.stated if engine.own is not None else None
    if stated is not None:
        for key in TYPE_KEYS:
            text = set_keys(text, {key: stated[key]}) if key in stated else remove_key(text, key)
    if quantization is None:
        text = remove_key(text, QUANTIZATION_KEY)
    elif quantization != engine.config.get(QUANTIZATION_KEY):
        text = set_keys(text, {QUANTIZATION_KEY: quantization})
    return _write_text(folder, text)


def require_unquantized(folder: CheckpointFolder, *, hint: str) -> OwnKey:
    """What an unquantized engine checkpoint says of itself. Raises CheckpointError, with `hint`, for other folders."""
    if folder.own is None or folder.own.quantization is not None:
        state = "is not an engine checkpoint" if folder.own is None else "is quantized already"
        raise CheckpointError(f"{folder.path} {state}", hint=hint)
    return folder.own


def _read_text(folder: CheckpointFolder) -> str:
    return (folder.path / CONFIG).read_text(encoding="utf-8")


def _write_text(folder: Path, text: str) -> Path:
    path = folder / CONFIG
    path.write_text(text, encoding="utf-8")
    return path
