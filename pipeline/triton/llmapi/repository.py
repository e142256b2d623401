"""Emits a package of flavour `llmapi`.

model_repository/tensorrt_llm/1/model.yaml   what NVIDIA's Triton model is told
artifacts/checkpoint-…                       the Hugging Face checkpoint, quantized
launch.sh                                    starts it in NVIDIA's image, which brings the model's own files
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from pipeline.progress import SILENT, Progress
from pipeline.triton import MODEL_REPO
from pipeline.triton.emission import ARTIFACTS, REPOSITORY, VERSION, Linker, by_name, open_with_tokenizer
from pipeline.triton.launch import write_launch
from pipeline.triton.llmapi.model_yaml import list_arguments

if TYPE_CHECKING:
    from pipeline.config.schema import Config

MODEL, ARGUMENTS = "tensorrt_llm", "model.yaml"


def emit_repository(
    output: Path,
    *,
    config: Config,
    checkpoint: Path,
    on_link: Callable[[Path, str], object] = lambda file, digest: None,
    progress: Progress = SILENT,
) -> None:
    """Writes the package into the folder `output`. `checkpoint`: the exported Hugging Face folder. `on_link` is told of
    every file linked or copied, with its digest. Raises PackageError where it has no tokenizer."""
    folder = open_with_tokenizer(checkpoint)
    files = sorted(file for file in checkpoint.iterdir() if file.is_file())
    progress.start("package", sum(file.stat().st_size for file in files), "B")
    linked = Linker(output / ARTIFACTS, on_link, progress).link_folder("checkpoint", by_name(files))
    arguments = list_arguments(
        config, model=f"{ARTIFACTS}/{linked.name}", routed=folder.architecture.experts is not None
    )
    version = output / REPOSITORY / MODEL / VERSION
    version.mkdir(parents=True)
    (version / ARGUMENTS).write_text(yaml.safe_dump(arguments, sort_keys=False), encoding="utf-8")
    parallel = config.target.parallel
    write_launch(output, MODEL_REPO / "launch" / "llmapi.sh", ranks=parallel.tensor * parallel.pipeline)
