"""Whether an engine that was built elsewhere is the one that a job asked for: every difference, in one message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.engine.tensorrt_llm.engine_folder import EngineFolder
from pipeline.engine.tensorrt_llm.job import (
    BUILD_CONFIG,
    CHECKPOINT,
    CONFIG,
    name_job,
    read_json,
    read_request,
)
from pipeline.engine.tensorrt_llm.options import PLUGIN_CONFIG
from pipeline.engine.tensorrt_llm.request import EngineRequest
from pipeline.engine.tensorrt_llm.versions import judge, load_releases
from pipeline.errors import BuildError

# Without these, config.json does not say what the engine is; its other keys are compared where they are there.
IDENTITY = ("architecture", "dtype", "logits_dtype", "num_hidden_layers", "hidden_size", "vocab_size")
UNORDERED = "exclude_modules"
AUTO = "auto"  # of a plugin: trtllm-build may write it as it is, or as the model's type
NO_RECEIPT = (
    "no receipt.json: build.sh did not build this, so that nothing says its weights are this job's, nor its GPU the "
    "one that was asked for"
)


def check_engine(engine: EngineFolder, job: Path, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """What must be known of an engine that is taken. Raises BuildError with all that differs from what `job` asked, or
    is missing or damaged."""
    differences = [*find_differences(engine, job), *engine.find_damage(on_bytes)]
    if differences:
        raise BuildError(
            f"{engine.path} is not the engine that was asked for:\n" + "\n".join(f"  {text}" for text in differences),
            hint="run the job's build.sh again where its README.md says, or set the config to what was built",
        )
    return [] if engine.receipt is not None else [NO_RECEIPT]


def find_differences(engine: EngineFolder, job: Path) -> list[str]:
    """Version, mapping, quantization, type, sizes, limits and plugins; job and GPU where the receipt states them."""
    request = read_request(job)
    build, checkpoint = read_json(job / BUILD_CONFIG), read_json(job / CHECKPOINT / CONFIG)
    found, dtype = engine.config, checkpoint.get("dtype")
    asked_model = {**checkpoint, "logits_dtype": request.logits_dtype}
    differences = []
    if engine.version != request.version:
        verdict = judge(engine.version, request.image)
        differences.append(f"version is {engine.version}, asked for {request.version}: {verdict.reason}")
    differences += _compare("pretrained_config", asked_model, found["pretrained_config"], dtype)
    differences += _compare("build_config", build, found["build_config"], dtype)
    if engine.receipt is not None:
        differences += _compare_receipt(engine.receipt, request, name_job(job))
    return differences


def _compare(path: str, asked: Mapping[str, Any], found: Any, dtype: str | None) -> Iterator[str]:
    """Of every key that was asked."""
    if not isinstance(found, Mapping):
        yield f"{path} is {found!a}, not a map"
        return
    for key, wanted in asked.items():
        place = f"{path}.{key}"
        if key not in found:
            if key in IDENTITY or isinstance(wanted, Mapping) or path.endswith((PLUGIN_CONFIG, ".mapping")):
                yield f"{place} is not stated"
        elif isinstance(wanted, Mapping):
            yield from _compare(place, wanted, found[key], dtype)
        elif not _agree(key, wanted, found[key], dtype):
            yield f"{place} is {_show(found[key])}, asked for {_show(wanted)}"


def _agree(key: str, wanted: Any, found: Any, dtype: str | None) -> bool:
    if key == UNORDERED and isinstance(wanted, list) and isinstance(found, list):
        return sorted(map(str, wanted)) == sorted(map(str, found))
    if wanted == AUTO:
        return found in (AUTO, dtype)
    if key == "opt_num_tokens" and wanted is None:
        return True
    if isinstance(wanted, bool) or isinstance(found, bool):
        return bool(wanted is found)
    return bool(wanted == found)


def _show(value: Any) -> str:
    return json.dumps(value)


def _compare_receipt(receipt: Mapping[str, Any], request: EngineRequest, job: str) -> Iterator[str]:
    if receipt.get("job") != job:
        yield "the receipt is of another job: of other weights, or settings that config.json does not state"
    if receipt.get("sm") != request.sm:
        yield f"it was built on SM{receipt.get('sm')!a}, asked for SM{request.sm} ({request.gpu})"
    if receipt.get("tensorrt_llm") != request.version:
        yield f"the receipt states TensorRT-LLM {receipt.get('tensorrt_llm')!a}, asked for {request.version}"
    series, tensorrt = load_releases()[request.version].series, str(receipt.get("tensorrt"))
    if tensorrt != "unknown" and tensorrt != series and not tensorrt.startswith(f"{series}."):
        yield f"it was built with TensorRT {tensorrt!a}, and TensorRT-LLM {request.version} is of {series}"
