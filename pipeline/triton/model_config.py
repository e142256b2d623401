"""The five models' `ModelConfig`s: the base text of `model_repo/`, completed as a protobuf, never as text.

Substituting text is where config.pbtxt files go wrong: a forgotten placeholder in a string still parses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import PackageError
from pipeline.triton import MODEL_REPO

if TYPE_CHECKING:
    from pipeline.config.schema import Config

# No text has more on average, not even a long run of spaces. A longer one cannot fit, and is not tokenized to know it.
BYTES_PER_TOKEN = 128
EXECUTOR = "tensorrt_llm"  # the model behind the texts'
MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What the five models are told: their parameters, in Python's types or None for what is left out, and processes,
    by model."""

    max_batch_size: int
    max_queue_size: int
    max_queue_delay_us: int = 0
    parameters: Mapping[str, Mapping[str, object]]
    instances: Mapping[str, int]


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


def build_configs(models: Models) -> dict[str, Any]:
    """A complete ModelConfig for each of the five models, by name."""
    configs = {model: load_base(model) for model in MODELS}
    for model, parameters in models.parameters.items():
        for key, value in parameters.items():
            if value is not None:
                configs[model].parameters[key].string_value = _spell(value)
    for model, count in models.instances.items():
        _add_instances(configs[model], count)
    for config in configs.values():
        config.max_batch_size = models.max_batch_size
    for model in ("preprocessing", "tensorrt_llm"):
        batching = configs[model].dynamic_batching
        batching.preferred_batch_size.append(models.max_batch_size)
        batching.max_queue_delay_microseconds = models.max_queue_delay_us
        batching.default_queue_policy.max_queue_size = models.max_queue_size
    configs["postprocessing"].dynamic_batching.SetInParent()
    return configs


def text_parameters(config: Config, tokenizer: str, *, max_streams: int) -> dict[str, Mapping[str, object]]:
    """Those of the models that take or give text. `max_streams`: requests that one process of tensorrt_llm_bls serves
    at a time."""
    package = config.stages.package
    before = {
        "tokenizer_dir": tokenizer,
        "add_special_tokens": package.add_special_tokens,
        "max_prompt_bytes": config.stages.build.max_seq_len * BYTES_PER_TOKEN,
    }
    after = {"tokenizer_dir": tokenizer, "skip_special_tokens": package.skip_special_tokens}
    return {
        "preprocessing": before,
        "postprocessing": after,
        "tensorrt_llm_bls": {
            **before,
            **after,
            "tensorrt_llm_model_name": "tensorrt_llm",
            "accumulate_tokens": False,  # true repeats the whole text so far in every response
            "max_streams": max_streams,
        },
    }


def count_instances(config: Config) -> dict[str, int]:
    """Processes by model, of flavour trtseek. One engine and one process for each text path: more would hold another
    engine, or threads have them already."""
    package = config.stages.package
    return {
        "preprocessing": package.preprocessing_instances,
        "tensorrt_llm": 1,
        "postprocessing": package.postprocessing_instances,
        "ensemble": 1,
        "tensorrt_llm_bls": 1,
    }


def _add_instances(config: Any, count: int) -> None:
    from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

    # CPU for Triton: the executor takes its GPU itself, and a server without one refuses KIND_GPU.
    config.instance_group.add(count=count, kind=ModelInstanceGroup.KIND_CPU)


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
