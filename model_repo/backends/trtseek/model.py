"""Triton backend `trtseek`, in Python: checks the engine it is given. Executing requests is not part of this version.

Triton runs this file for every model whose config says `backend: "trtseek"`, once this folder's parent is named by
`--backend-directory`. A model loads only when its engine, its checkpoint and the network that was proved belong
together; each request is then answered with an error that says what is missing, never with made-up tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

REFUSAL = (
    "this version of trtseek emits and checks model repositories but does not serve them: the executor that runs "
    "requests is not part of it"
)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        folder = Path(args["model_repository"])
        if folder.name != args["model_name"]:
            folder = folder / args["model_name"]
        problems = check_model(folder, {key: value["string_value"] for key, value in parameters.items()})
        if problems:
            raise pb_utils.TritonModelException("; ".join(problems))

    def execute(self, requests: list[Any]) -> None:
        """Answers each request with REFUSAL. The model is decoupled: answers go through the request's own sender."""
        for request in requests:
            sender = request.get_response_sender()
            sender.send(
                pb_utils.InferenceResponse(error=pb_utils.TritonError(REFUSAL)),
                flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )


def check_model(folder: Path, parameters: dict[str, str]) -> list[str]:
    """What is wrong with a model whose own folder is `folder`; path parameters are relative to it."""
    problems: list[str] = []
    engine = _read_json(folder / parameters["gpt_model_path"] / "engine.json", problems)
    network = _read_json(folder / parameters["network_path"], problems)
    proved = parameters["network_digest"]
    for name, document, key in (("engine.json", engine, "network_digest"), ("network.json", network, "digest")):
        if document is not None and document.get(key) != proved:
            problems.append(f"{name} is of network {document.get(key)}, the repository of {proved}")
    if engine is not None:
        if engine["digest"] != parameters["engine_digest"]:
            problems.append(f"engine.json is of engine {engine['digest']}, not {parameters['engine_digest']}")
        _check_file(folder / parameters["gpt_model_path"] / engine["file"], engine["nbytes"], problems)
        checkpoint = folder / parameters["checkpoint_path"]
        for name in engine["sources"]:
            _check_file(checkpoint / name, None, problems)
    return problems


def _read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: {error}")
        return None
    if isinstance(document, dict):
        return document
    problems.append(f"{path.name} does not hold an object")
    return None


def _check_file(path: Path, nbytes: int | None, problems: list[str]) -> None:
    if not path.is_file():
        problems.append(f"{path.name} is missing")
    elif nbytes is not None and path.stat().st_size != nbytes:
        problems.append(f"{path.name} has {path.stat().st_size} bytes, engine.json says {nbytes}")
