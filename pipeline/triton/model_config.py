"""The five models' `ModelConfig`s: the base text of `model_repo/`, completed as a protobuf, never as text.

Substituting text is where config.pbtxt files go wrong: a forgotten placeholder in a string still parses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import PackageError
from pipeline.triton import MODEL_REPO

# No text has more on average, not even a long run of spaces. A longer one cannot fit, and is not tokenized to know it.
BYTES_PER_TOKEN = 128
MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where the models find their files, relative to each model's own folder, so that a release can be moved."""

    engine: str
    checkpoint: str
    network: str
    tokenizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositorySettings:
    """What the models are told, in their own types; `build_configs` spells it as Triton wants it."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    block_size: int
    network_digest: str
    engine_digest: str
    kv_cache_free_gpu_mem_fraction: float
    max_tokens_in_paged_kv_cache: int | None
    batch_scheduler_policy: str
    enable_kv_cache_reuse: bool
    max_queue_size: int
    runner: str
    interpreter_mode: str
    add_special_tokens: bool
    skip_special_tokens: bool
    preprocessing_instances: int
    postprocessing_instances: int


def load_base(model: str) -> Any:
    """The base ModelConfig of `model`: name, backend, tensors, and for the ensemble its wiring."""
    path = MODEL_REPO / model / "config.pbtxt"
    return parse_config(path.read_text(encoding="utf-8"), str(path))


def parse_config(text: str, origin: str) -> Any:
    """A ModelConfig from its text form. Raises PackageError with line and column."""
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise PackageError(f"{origin}: {error}") from error


def print_config(config: Any) -> str:
    """The text form of a ModelConfig, as `config.pbtxt` holds it."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(config))


def build_configs(settings: RepositorySettings, paths: Paths) -> dict[str, Any]:
    """A complete ModelConfig for each of the five models, by name."""
    configs = {model: load_base(model) for model in MODELS}
    for model, parameters in _list_parameters(settings, paths).items():
        for key, value in parameters.items():
            if value is not None:
                configs[model].parameters[key].string_value = _spell(value)
    for model, count in _count_instances(settings).items():
        _add_instances(configs[model], count)
    for config in configs.values():
        config.max_batch_size = settings.max_batch_size
    for model in ("preprocessing", "tensorrt_llm"):
        batching = configs[model].dynamic_batching
        batching.preferred_batch_size.append(settings.max_batch_size)
        batching.default_queue_policy.max_queue_size = settings.max_queue_size
    configs["postprocessing"].dynamic_batching.SetInParent()
    return configs


def _list_parameters(settings: RepositorySettings, paths: Paths) -> dict[str, Mapping[str, object]]:
    """Keys that TensorRT-LLM's backend has keep their names and meanings; those after FORCE_CPU_ONLY are ours."""
    return {
        "preprocessing": {
            "tokenizer_dir": paths.tokenizer,
            "add_special_tokens": settings.add_special_tokens,
        },
        "tensorrt_llm": {
            "gpt_model_type": "inflight_fused_batching",
            "gpt_model_path": paths.engine,
            "tokenizer_dir": paths.tokenizer,
            "max_beam_width": 1,
            "kv_cache_free_gpu_mem_fraction": settings.kv_cache_free_gpu_mem_fraction,
            "max_tokens_in_paged_kv_cache": settings.max_tokens_in_paged_kv_cache,
            "batch_scheduler_policy": settings.batch_scheduler_policy,
            "enable_kv_cache_reuse": settings.enable_kv_cache_reuse,
            "FORCE_CPU_ONLY_INPUT_TENSORS": "yes",  # the executor plans its steps on the host
            "checkpoint_path": paths.checkpoint,
            "network_path": paths.network,
            "network_digest": settings.network_digest,
            "engine_digest": settings.engine_digest,
            "max_seq_len": settings.max_seq_len,
            "max_num_tokens": settings.max_num_tokens,
            "block_size": settings.block_size,
            "max_queue_size": settings.max_queue_size,
            "runner": settings.runner,
            "interpreter_mode": settings.interpreter_mode,
        },
        "postprocessing": {
            "tokenizer_dir": paths.tokenizer,
            "skip_special_tokens": settings.skip_special_tokens,
        },
        "tensorrt_llm_bls": {
            "tensorrt_llm_model_name": "tensorrt_llm",
            "accumulate_tokens": False,  # true repeats the whole text so far in every response
            "tokenizer_dir": paths.tokenizer,
            "add_special_tokens": settings.add_special_tokens,
            "skip_special_tokens": settings.skip_special_tokens,
            "max_prompt_bytes": settings.max_seq_len * BYTES_PER_TOKEN,
        },
    }


def _count_instances(settings: RepositorySettings) -> dict[str, int]:
    # One engine and one asynchronous BLS each: an instance more would hold another engine, or split the batch.
    return {
        "preprocessing": settings.preprocessing_instances,
        "tensorrt_llm": 1,
        "postprocessing": settings.postprocessing_instances,
        "tensorrt_llm_bls": 1,
    }


def _add_instances(config: Any, count: int) -> None:
    from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

    # CPU for Triton: the executor takes its GPU itself, and a server without one refuses KIND_GPU.
    config.instance_group.add(count=count, kind=ModelInstanceGroup.KIND_CPU)


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
