"""What Triton checks when it loads a repository, and what it does not, before the repository is committed.

The server itself misses duplicate tensor names and placeholders left in strings, and reports the rest one model at a
time in its log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import PackageError
from pipeline.triton.model_config import parse_config
from pipeline.triton.wiring import find_wiring_problems

# Parameters whose values are paths, relative to the model's folder, or as NVIDIA's backend reads them to the package's.
PATH_PARAMETERS = ("gpt_model_path", "checkpoint_path", "network_path", "tokenizer_dir")
# Backends that are a model.py in the model's own version folder; others are looked for among the emitted backends.
OWN_CODE_BACKENDS = ("python",)


def check_repository(path: Path, *, backends: Path | None) -> None:
    """Raises PackageError with every problem that `lint_repository` finds."""
    if problems := list(lint_repository(path, backends=backends)):
        raise PackageError("\n".join(problems), hint="this is a fault in trtseek or an edited file: emit it again")


def lint_repository(path: Path, *, backends: Path | None) -> Iterator[str]:
    """Problems of a model repository, one sentence each, naming the file. `backends`: the Python-based ones that come
    with it, None where they are the server's own."""
    configs: dict[str, Any] = {}
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        file = folder / "config.pbtxt"
        if not file.is_file():
            yield f"{file} is missing; Triton takes every folder for a model"
            continue
        text = file.read_text(encoding="utf-8")
        if "${" in text:
            line = text[: text.index("${")].count("\n") + 1
            yield f"{file}:{line}: a placeholder ${{…}} was never filled"
        try:
            config = configs[folder.name] = parse_config(text, str(file))
        except PackageError as error:
            yield error.message
            continue
        yield from (f"{file}: {problem}" for problem in _lint_model(folder, config, backends))
    if not configs:
        yield f"{path} holds no model"
    for name, config in configs.items():
        if config.HasField("ensemble_scheduling"):
            for problem in find_wiring_problems(config, configs):
                yield f"{path / name / 'config.pbtxt'}: {problem}"


def _lint_model(folder: Path, config: Any, backends: Path | None) -> Iterator[str]:
    if config.name != folder.name:
        yield f"name {config.name!r} is not the folder's, {folder.name!r}"
    if config.max_batch_size < 1:
        yield f"max_batch_size is {config.max_batch_size}"
    for kind, tensors in (("input", config.input), ("output", config.output)):
        if not tensors:
            yield f"there is no {kind}"
        for name, count in Counter(tensor.name for tensor in tensors).items():
            if count > 1:
                yield f"{kind} {name} is declared {count} times"
        for tensor in tensors:
            yield from _lint_tensor(kind, tensor)
    for preferred in config.dynamic_batching.preferred_batch_size:
        if preferred > config.max_batch_size:
            yield f"preferred_batch_size {preferred} exceeds max_batch_size {config.max_batch_size}"
    for key in PATH_PARAMETERS:
        if key not in config.parameters:
            continue
        value = config.parameters[key].string_value
        if not any((origin / value).exists() for origin in (folder, folder.parent.parent)):
            yield f"parameter {key} names {value}, which does not exist"
    yield from _lint_code(folder, config, backends)


def _lint_tensor(kind: str, tensor: Any) -> Iterator[str]:
    if tensor.data_type == 0:
        yield f"{kind} {tensor.name} has no data_type"
    if not tensor.dims or any(size == 0 or size < -1 for size in tensor.dims):
        yield f"{kind} {tensor.name} has dims {list(tensor.dims)}"


def _lint_code(folder: Path, config: Any, backends: Path | None) -> Iterator[str]:
    versions = [entry for entry in folder.iterdir() if entry.is_dir() and entry.name.isdigit()]
    if not versions:
        yield "there is no version folder"
    if config.platform == "ensemble":
        return
    if config.backend in OWN_CODE_BACKENDS:
        sources = [version / "model.py" for version in versions]
    elif config.backend:
        sources = [backends / config.backend / "model.py"] if backends else []
    else:
        yield "there is neither a backend nor a platform"
        return
    for source in sources:
        if not source.is_file():
            yield f"{source} is missing"
            continue
        try:
            compile(source.read_text(encoding="utf-8"), str(source), "exec")
        except SyntaxError as error:
            yield f"{source}:{error.lineno}: {error.msg}"
