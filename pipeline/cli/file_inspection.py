"""What a single file is, by its first bytes and its name: for `inspect`. Engines have their own describer."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from pipeline.errors import TrtseekError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pipeline.checkpoint.gguf_header import GgufTensor
    from pipeline.checkpoint.tensors import TensorInfo

Document = dict[str, Any]
ENGINE_MAGIC = b"vtrt"
ENGINE_SUFFIXES = (".engine", ".plan", ".trt")
YAML_SUFFIXES = (".yaml", ".yml")
MAX_JSON = 64 << 20  # bytes
KEYS = 50  # of a JSON file, that are shown
LOOKED_FOR = (
    "what is known: a run's folder (out/<name>), the output of a stage, a checkpoint's folder (config.json and "
    "safetensors), TensorRT-LLM's rank checkpoints (config.json and rank0.safetensors), its jobs and engines, a "
    "safetensors or GGUF file, an engine, its engine.json or its folder, a Triton model repository (folders with "
    "config.pbtxt), a JSON file"
)
# What is told -> the key of a GGUF file, after the architecture's name.
GGUF_KEYS = {
    "layers": "block_count",
    "hidden_size": "embedding_length",
    "heads": "attention.head_count",
    "key_value_heads": "attention.head_count_kv",
    "routed_experts": "expert_count",
    "context": "context_length",
}
# Files whose folder says more than they do.
BETTER_AS_FOLDER = ("config.json", "artifact.json", "run.json", "model.safetensors.index.json")


class InspectionError(TrtseekError):
    """The path holds nothing that `inspect` knows."""


def is_engine_file(path: Path) -> bool:
    return path.is_file() and (path.suffix in ENGINE_SUFFIXES or read_start(path, len(ENGINE_MAGIC)) == ENGINE_MAGIC)


def read_start(path: Path, count: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except OSError as error:
        raise InspectionError(f"{path}: {error.strerror}", hint="check its permissions") from None


def describe_file(path: Path) -> Document:
    """The description of a file that is no engine. InspectionError where nothing can be said."""
    describe = FILES.get(path.suffix)
    if describe is None:
        raise InspectionError(f"{path}: a file of no kind that inspect knows", hint=LOOKED_FOR)
    return describe(path)


def _describe_safetensors(path: Path) -> Document:
    from pipeline.checkpoint.safetensors_file import SafetensorsFile

    file = SafetensorsFile(path)
    return {
        "kind": "safetensors file",
        "path": str(path),
        "bytes": path.stat().st_size,
        "metadata": dict(file.metadata),
        "tensors": summarize_tensors(file.tensors.values()),
        "largest": _list_largest(file.tensors.values()),
    }


def _describe_gguf(path: Path) -> Document:
    from pipeline.checkpoint.gguf_header import read_gguf

    header = read_gguf(path)
    values, name = header.values, header.values.get("general.architecture")
    tensors = summarize_tensors(header.tensors)
    return {
        "kind": "GGUF file",
        "path": str(path),
        "bytes": path.stat().st_size,
        "version": header.version,
        "architecture": name,
        "name": values.get("general.name"),
        **{title: values.get(f"{name}.{key}") for title, key in GGUF_KEYS.items()},
        "vocabulary": values.get("tokenizer.ggml.tokens"),
        "quantization": max(tensors, key=lambda row: row["bytes"])["dtype"] if tensors else None,
        "tensors": tensors,
        "largest": _list_largest(header.tensors),
    }


def is_gguf_folder(path: Path) -> bool:
    """One that `export --format gguf` wrote, or another with one such file and no checkpoint beside it."""
    return len(list(path.glob("*.gguf"))) == 1 and not any(path.glob("*.safetensors"))


def describe_gguf_folder(path: Path) -> Document:
    return _describe_gguf(next(path.glob("*.gguf")))


def _list_largest(tensors: Iterable[TensorInfo | GgufTensor]) -> list[Document]:
    return [
        {"name": info.name, "dtype": info.dtype, "shape": list(info.shape), "bytes": info.nbytes}
        for info in sorted(tensors, key=lambda info: -info.nbytes)[:10]
    ]


def summarize_tensors(tensors: Iterable[TensorInfo | GgufTensor]) -> list[Document]:
    """How many tensors of each type there are, and their bytes."""
    sizes, counts = Counter[str](), Counter[str]()
    for info in tensors:
        sizes[info.dtype] += info.nbytes
        counts[info.dtype] += 1
    return [{"dtype": dtype, "count": counts[dtype], "bytes": sizes[dtype]} for dtype in sorted(sizes)]


def _describe_json(path: Path) -> Document:
    if path.stat().st_size > MAX_JSON:
        raise InspectionError(f"{path}: more than {MAX_JSON >> 20} MiB of JSON", hint=LOOKED_FOR)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InspectionError(
            f"{path}: not valid JSON: {error}", hint="it is damaged, or was not written to its end"
        ) from None
    document = {"kind": "JSON file", "path": str(path), "bytes": path.stat().st_size}
    if isinstance(value, dict):
        document["keys"] = list(value)[:KEYS]
    if path.name in BETTER_AS_FOLDER:
        document["see"] = f"trtseek inspect {path.parent}"
    return document


def _refuse_config(path: Path) -> Document:
    raise InspectionError(
        f"{path} is a config, not a result",
        hint=f"`trtseek validate {path}` checks it, `trtseek plan {path}` says what it makes",
    )


FILES: dict[str, Callable[[Path], Document]] = {
    ".safetensors": _describe_safetensors,
    ".gguf": _describe_gguf,
    ".json": _describe_json,
    **dict.fromkeys(YAML_SUFFIXES, _refuse_config),
}
