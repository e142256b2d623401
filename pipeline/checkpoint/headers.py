"""A source checkpoint's config.json held against the headers of its shards, before any weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.checkpoint.engine_config import QUANTIZATION_KEY
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.foreign.folder import ForeignFolder
from pipeline.checkpoint.foreign.marks import MARKS
from pipeline.checkpoint.foreign.methods import find_method
from pipeline.checkpoint.layouts import layout_for, matches_plainly
from pipeline.checkpoint.layouts.scales import FP8
from pipeline.checkpoint.shard_index import CONFIG
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pipeline.checkpoint.layouts import Mapping

# What an FP8 checkpoint holds in FP8, all of it: the linears of its decoder layers.
FP8_ROLES = ("attention_input", "attention_latent", "attention_output", "mlp", "shared_experts", "experts")
TOKENIZER = "tokenizer.json"


def check_headers(folder: CheckpointFolder) -> None:
    """Raises CheckpointError, with file and tensor, where config.json and the weights are of two models: a layer or
    expert too few or too many, another shape, 16-bit weights that are said to be FP8; for what another tool has
    quantized in a way that is not read; and where no tokenizer is."""
    method = find_method(folder)
    if method is not None:
        ForeignFolder(folder, method).match()
    else:
        _check_unquantized(folder)
    check_tokenizer(folder.path)


def _check_unquantized(folder: CheckpointFolder) -> None:
    """Of plain weights, or DeepSeek's FP8."""
    from pipeline.checkpoint.block_scales import check_config

    quantized = folder.config.get(QUANTIZATION_KEY) is not None
    check_config(folder.config, str(folder.path / CONFIG))  # first: quantized weights have other names
    if not quantized and (mark := next((name for name in folder.tensors if name.endswith(MARKS)), None)):
        raise CheckpointError(
            f"{folder.path / CONFIG}: has no quantization_config, and {mark} is of a quantized model",
            hint="copy config.json from the model's own repository again",
        )
    mappings: Sequence[Mapping] = ()
    if not matches_plainly(folder.architecture, folder.tensors, fp8_roles=FP8_ROLES if quantized else None):
        mappings, _ = layout_for(folder.architecture).match(folder.tensors, str(folder.path))
    if quantized:
        _refuse_plain_weights(folder, mappings)


def check_tokenizer(path: Path) -> None:
    """Raises CheckpointError where the folder `path` has no tokenizer."""
    if not (path / TOKENIZER).is_file():
        raise CheckpointError(
            f"{path / TOKENIZER} is missing: calibration, held-out text and the package need it",
            hint="copy it from the model's own repository; a tokenizer.model alone is not read",
        )


def _refuse_plain_weights(folder: CheckpointFolder, mappings: Iterable[Mapping]) -> None:
    kept = folder.config[QUANTIZATION_KEY].get("modules_to_not_convert") or ()
    for mapping in mappings:
        if mapping.role not in FP8_ROLES:
            continue
        for name in mapping.sources:
            info = folder.tensors[name]
            if info.dtype != FP8 and name.endswith(".weight") and not any(str(module) in name for module in kept):
                raise CheckpointError(
                    f"{folder.file_of(name)}: {name} is {info.dtype}, but quantization_config in "
                    f"{folder.path / CONFIG} says that it is FP8",
                    hint="where the weights were multiplied out to 16 bits, remove quantization_config from "
                    "config.json; else take the weights again from the model's own repository",
                )
