"""What `inspect` says of a package, and of a Triton model repository in it or alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

REPOSITORY = "model_repository"  # within what `package` makes
MODEL_YAML = f"{REPOSITORY}/tensorrt_llm/1/model.yaml"
Document = dict[str, Any]


def is_repository(path: Path) -> bool:
    return any(path.glob("*/config.pbtxt")) or any(path.glob(f"{REPOSITORY}/*/config.pbtxt"))


def is_llmapi(path: Path) -> bool:
    return (path / MODEL_YAML).is_file()


def describe_repository(path: Path) -> Document:
    from pipeline.triton.emission import BACKENDS
    from pipeline.triton.lint import lint_repository
    from pipeline.triton.model_config import parse_config

    root = path if any(path.glob("*/config.pbtxt")) else path / REPOSITORY
    models, parameters = [], {}
    for file in sorted(root.glob("*/config.pbtxt")):
        config = parse_config(file.read_text(encoding="utf-8"), str(file))
        models.append(
            {
                "name": config.name,
                "backend": config.backend or config.platform,
                "versions": sorted(folder.name for folder in file.parent.iterdir() if folder.name.isdigit()),
                "inputs": [tensor.name for tensor in config.input],
                "outputs": [tensor.name for tensor in config.output],
            }
        )
        if config.parameters:
            parameters[config.name] = {key: value.string_value for key, value in sorted(config.parameters.items())}
    backends = root.parent / BACKENDS
    is_foreign = any(model["backend"] == "tensorrtllm" for model in models)  # whose backend is in NVIDIA's image
    problems = None  # what is no package, the models' own sources say, has no backends and is not complete
    if is_foreign or backends.is_dir():
        problems = [*_find_damage(root.parent), *lint_repository(root, backends=None if is_foreign else backends)]
    return {
        "kind": "Triton model repository",
        "path": str(root),
        "models": models,
        "parameters": parameters,
        "problems": problems,
    }


def describe_llmapi(path: Path) -> Document:
    import yaml

    file = path / MODEL_YAML
    return {
        "kind": "package for TensorRT-LLM's LLM API",
        "path": str(path),
        "told": str(file),
        "arguments": yaml.safe_load(file.read_text(encoding="utf-8")),
        "problems": _find_damage(path),
    }


def _find_damage(package: Path) -> list[str]:
    from pipeline.release.manifest import MANIFEST, find_wrong_sizes

    return find_wrong_sizes(package) if (package / MANIFEST).is_file() else []
