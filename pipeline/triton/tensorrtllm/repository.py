"""Emits a Triton model repository of flavour `tensorrtllm`, and beside it what its models need.

    model_repository/  the five models: config.pbtxt and, of the text models, our own code
    artifacts/         engine-…, tokenizer-…: folders named after their content's digest
    launch.sh          starts it in NVIDIA's image

The C++ backend takes the engine's folder as it is told, from where the server was started: launch.sh does that in the
package's own folder, so that a package can be moved. No backend is part of it: NVIDIA's image has that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PackageError
from pipeline.progress import SILENT, Progress
from pipeline.triton import MODEL_REPO
from pipeline.triton.emission import (
    ARTIFACTS,
    BY_TRITON,
    REPOSITORY,
    Linker,
    by_name,
    list_modules,
    open_with_tokenizer,
    write_models,
)
from pipeline.triton.launch import write_launch
from pipeline.triton.lint import check_repository
from pipeline.triton.model_config import Models, build_configs, text_parameters
from pipeline.triton.tensorrtllm.parameters import count_bls, list_parameters

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.engine.tensorrt_llm.request import EngineRequest

BACKEND = "tensorrtllm"
# Tensors whose type is that of the engine's logits.
LOGITS = ("draft_logits", "context_logits", "generation_logits")
TRITON_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16"}


def emit_repository(
    output: Path,
    *,
    config: Config,
    build: Path,
    checkpoint: Path,
    on_link: Callable[[Path, str], object] = lambda file, digest: None,
    progress: Progress = SILENT,
) -> None:
    """Writes the repository into the folder `output` and lints it. `build`: the build stage's output; `checkpoint`: the
    engine checkpoint, for its tokenizer. `on_link` is told of every file linked or copied, with its digest. Raises
    BuildError where the engine is damaged, PackageError where there is no tokenizer, or for what `lint` finds."""
    from pipeline.engine.tensorrt_llm.engine_folder import read_engine_folder
    from pipeline.engine.tensorrt_llm.record import ENGINE, load_record
    from pipeline.engine.tensorrt_llm.request import EngineRequest

    record, engine = load_record(build), read_engine_folder(build / ENGINE)
    request = EngineRequest.from_json(record.request)
    folder = open_with_tokenizer(checkpoint)
    if different := {name for name in record.files if record.files[name] != engine.files.get(name)}:
        raise PackageError(
            f"{engine.path}: {', '.join(sorted(different))} changed since the build", hint="run the build stage again"
        )
    files = {
        "engine": {name: engine.path / name for name in engine.files},
        "tokenizer": by_name(folder.tokenizer_files),
    }
    nbytes = sum(file.stat().st_size for group in files.values() for file in group.values())
    progress.start("package", nbytes, "B")
    linker = Linker(output / ARTIFACTS, on_link, progress)
    artifacts = {kind: f"{ARTIFACTS}/{linker.link_folder(kind, group).name}" for kind, group in files.items()}
    configs = build_configs(describe_models(config, request, **artifacts))
    set_types(configs, request.logits_dtype)
    write_models(output / REPOSITORY, configs, list_modules(BY_TRITON))
    script = MODEL_REPO / "launch" / "tensorrtllm.sh"
    write_launch(output, script, ranks=engine.world, tensorrt_llm=record.version, image=record.image)
    check_repository(output / REPOSITORY, backends=None)


def describe_models(config: Config, request: EngineRequest, *, engine: str, tokenizer: str) -> Models:
    """What the models are told of a config. `engine`, `tokenizer`: folders from the package's own."""
    package, own = config.stages.package, config.stages.package.tensorrt_llm
    text = text_parameters(config, f"../../{tokenizer}", max_streams=1)
    return Models(
        max_batch_size=request.max_batch_size,
        max_queue_size=package.max_queue_size,
        max_queue_delay_us=own.max_queue_delay_microseconds,
        parameters={**text, "tensorrt_llm": list_parameters(config, request, engine=engine, tokenizer=tokenizer)},
        instances={
            "preprocessing": package.preprocessing_instances,
            "tensorrt_llm": 1,
            "postprocessing": package.postprocessing_instances,
            "tensorrt_llm_bls": count_bls(config, request),
        },
    )


def set_types(configs: dict[str, Any], logits_dtype: str) -> None:
    """The backend, and the type of the tensors that carry logits: the server checks neither against the engine."""
    from tritonclient.grpc.model_config_pb2 import DataType

    configs["tensorrt_llm"].backend = BACKEND
    for config in configs.values():
        for tensor in (*config.input, *config.output):
            if tensor.name in LOGITS:
                tensor.data_type = DataType.Value(TRITON_TYPES[logits_dtype])
