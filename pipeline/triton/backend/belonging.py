"""Whether an emitted model's files belong together, as far as their descriptions and sizes tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.engine.description import DESCRIPTION, EngineDescription, load_description
from pipeline.errors import PackageError, TrtseekError, spell_reason

# What a package's models are told and how they ask each other; raised where packages of before are not served any more.
# A package says its own as the parameter `package_format` of `tensorrt_llm`; the first ones said nothing.
FORMAT = 2
EMIT_AGAIN = "emit it again with this version: `trtseek engine CONFIG`"


def check_format(origin: Path, parameters: Mapping[str, str]) -> None:
    """Raises PackageError where the model comes from a version of trtseek whose packages this one does not serve.
    `origin`: what the message names."""
    found = parameters.get("package_format", "1")
    if found != str(FORMAT):
        raise PackageError(
            f"{origin} was emitted by another version of trtseek: it is of format {found}, and this version "
            f"({__version__}) serves format {FORMAT}",
            hint=EMIT_AGAIN,
        )


def check_model(folder: Path, parameters: Mapping[str, str]) -> list[str]:
    """What is wrong with the model's files, as far as their descriptions and sizes tell; nothing large is read."""
    problems: list[str] = []
    proved, found = parameters["network_digest"], {}
    if (network := _read_json(folder / parameters["network_path"], problems)) is not None:
        found["network.json"] = network.get("digest")
    try:
        engine = describe(folder, parameters)
    except PackageError as error:
        problems.append(error.message)
    else:
        found[DESCRIPTION] = engine.network_digest
        if engine.set_digest != parameters["engine_digest"]:
            problems.append(f"{DESCRIPTION} is of engine {engine.set_digest}, not {parameters['engine_digest']}")
        for rank in engine.all_ranks:
            _check_file(folder / parameters["gpt_model_path"], rank.file, rank.nbytes, problems)
        checkpoint = folder / parameters["checkpoint_path"]
        for name in engine.sources:
            _check_file(checkpoint, name, None, problems)
    for name, digest in found.items():
        if digest != proved:
            problems.append(f"{name} is of network {digest}, the repository of {proved}")
    return problems


def describe(folder: Path, parameters: Mapping[str, str]) -> EngineDescription:
    """The engine's. Raises PackageError where it cannot be read."""
    try:
        return load_description(folder / parameters["gpt_model_path"] / DESCRIPTION)
    except TrtseekError as error:
        raise PackageError(error.message, hint="package the engine again") from None


def _read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: {spell_reason(error)}")
        return None
    if isinstance(document, dict):
        return document
    problems.append(f"{path.name} does not hold an object")
    return None


def _check_file(folder: Path, name: str, nbytes: int | None, problems: list[str]) -> None:
    path = folder / name
    if not path.is_file():
        problems.append(f"{name} is missing")
    elif nbytes is not None and path.stat().st_size != nbytes:
        problems.append(f"{name} has {path.stat().st_size} bytes, {DESCRIPTION} says {nbytes}")
