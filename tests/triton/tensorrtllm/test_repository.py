"""The emitted repository: what TensorRT-LLM's backend is told, in its own types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.tensorrt_llm_serving import TensorRTLLMServing
from pipeline.errors import PackageError
from pipeline.triton.model_config import parse_config
from pipeline.triton.tensorrtllm.repository import emit_repository
from tests.triton.tensorrtllm.packages import emit, make_config, write_build

# Parameters of TensorRT-LLM 1.2's template for the tensorrt_llm model: others would be read by nobody.
KNOWN = [
    "max_beam_width",
    "FORCE_CPU_ONLY_INPUT_TENSORS",
    "gpt_model_type",
    "gpt_model_path",
    "encoder_model_path",
    "max_tokens_in_paged_kv_cache",
    "max_attention_window_size",
    "sink_token_length",
    "batch_scheduler_policy",
    "kv_cache_free_gpu_mem_fraction",
    "cross_kv_cache_fraction",
    "kv_cache_host_memory_bytes",
    "kv_cache_onboard_blocks",
    "exclude_input_in_output",
    "cancellation_check_period_ms",
    "stats_check_period_ms",
    "iter_stats_max_iterations",
    "request_stats_max_iterations",
    "enable_kv_cache_reuse",
    "normalize_log_probs",
    "enable_chunked_context",
    "gpu_device_ids",
    "participant_ids",
    "num_nodes",
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    "lora_prefetch_dir",
    "decoding_mode",
    "executor_worker_path",
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "medusa_choices",
    "eagle_choices",
    "gpu_weights_percent",
    "enable_context_fmha_fp32_acc",
    "multi_block_mode",
    "cuda_graph_mode",
    "cuda_graph_cache_size",
    "speculative_decoding_fast_logits",
    "tokenizer_dir",
    "guided_decoding_backend",
    "xgrammar_tokenizer_info_path",
]
# A value of each setting that differs from its default, and what the backend is then told.
SETTINGS: dict[str, tuple[Any, str, str]] = {
    "kv_cache_host_memory_bytes": (1 << 30, "kv_cache_host_memory_bytes", "1073741824"),
    "kv_cache_onboard_blocks": (False, "kv_cache_onboard_blocks", "false"),
    "max_attention_window_size": ([64, 128], "max_attention_window_size", "64,128"),
    "sink_token_length": (4, "sink_token_length", "4"),
    "decoding_mode": ("top_k", "decoding_mode", "top_k"),
    "normalize_log_probs": (False, "normalize_log_probs", "false"),
    "multi_block_mode": (False, "multi_block_mode", "false"),
    "cuda_graph_mode": (True, "cuda_graph_mode", "true"),
    "cuda_graph_cache_size": (8, "cuda_graph_cache_size", "8"),
    "gpu_weights_percent": (0.5, "gpu_weights_percent", "0.5"),
    "gpu_device_ids": ([3], "gpu_device_ids", "3"),
    "cancellation_check_period_ms": (20, "cancellation_check_period_ms", "20"),
    "stats_check_period_ms": (50, "stats_check_period_ms", "50"),
}
OTHERWISE = {"max_queue_delay_microseconds", "bls_instances"}  # not parameters of tensorrt_llm


def read(package: Path, model: str = "tensorrt_llm") -> Any:
    file = package / "model_repository" / model / "config.pbtxt"
    return parse_config(file.read_text(), str(file))


def parameters(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


@pytest.fixture(scope="module")
def package(converted_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emit(tmp_path_factory.mktemp("tensorrtllm"), converted_llama)


def test_the_backend_is_told_what_it_reads(package: Path) -> None:
    config = read(package)
    found = parameters(config)
    assert config.backend == "tensorrtllm"
    assert config.model_transaction_policy.decoupled
    assert not found.keys() - set(KNOWN)
    assert found["gpt_model_type"] == "inflight_fused_batching"
    assert (found["enable_chunked_context"], found["enable_kv_cache_reuse"]) == ("true", "true")
    assert found["batch_scheduler_policy"] == "guaranteed_no_evict"
    assert "max_tokens_in_paged_kv_cache" not in found  # unset means unbounded
    assert config.max_batch_size == 4


def test_paths_are_the_packages_own(package: Path) -> None:
    found = parameters(read(package))
    engine = package / found["gpt_model_path"]
    assert json.loads((engine / "config.json").read_text())["version"] == "1.2.1"
    assert (engine / "rank0.engine").is_file()
    assert (package / found["tokenizer_dir"] / "tokenizer_config.json").is_file()
    for model in ("preprocessing", "postprocessing", "tensorrt_llm_bls"):
        place = package / "model_repository" / model
        assert (place / parameters(read(package, model))["tokenizer_dir"] / "tokenizer_config.json").is_file()
    assert not (package / "backends").exists()  # NVIDIA's image has it


def test_the_text_path_asks_through_triton(package: Path) -> None:
    folder = package / "model_repository" / "tensorrt_llm_bls" / "1"
    assert "InferenceRequest" in (folder / "trtseek_child.py").read_text()
    assert not (folder / "trtseek_wire.py").exists()
    assert parameters(read(package, "tensorrt_llm_bls"))["max_streams"] == "1"
    assert read(package, "tensorrt_llm_bls").instance_group[0].count == 4


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_reach_the_backend(name: str, converted_llama: Path, tmp_path: Path) -> None:
    value, key, told = SETTINGS[name]
    config = make_config(package={"tensorrt_llm": {name: value}}, weight_streaming=name == "gpu_weights_percent")
    assert parameters(read(emit(tmp_path, converted_llama, config)))[key] == told


def test_every_setting_has_a_test() -> None:
    assert SETTINGS.keys() | OTHERWISE == TensorRTLLMServing.model_fields.keys()


def test_settings_of_other_models(converted_llama: Path, tmp_path: Path) -> None:
    config = make_config(package={"tensorrt_llm": {"bls_instances": 2, "max_queue_delay_microseconds": 500}})
    package = emit(tmp_path, converted_llama, config)
    assert read(package, "tensorrt_llm_bls").instance_group[0].count == 2
    assert read(package).dynamic_batching.max_queue_delay_microseconds == 500


def test_logits_have_the_engines_type(converted_llama: Path, tmp_path: Path) -> None:
    package = emit(tmp_path, converted_llama, make_config(tensorrt_llm={"logits_dtype": "float16"}))
    for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
        config = read(package, model)
        types = {t.name: t.data_type for t in (*config.input, *config.output) if t.name.endswith("_logits")}
        types = {name: kind for name, kind in types.items() if name in ("context_logits", "generation_logits")}
        assert set(types.values()) == {10}, model  # TYPE_FP16 of model_config.proto
        assert len(types) == 2


def test_an_engine_that_changed_is_refused(converted_llama: Path, tmp_path: Path) -> None:
    config = make_config()
    build = write_build(tmp_path / "build", config)
    (build / "engine" / "rank0.engine").write_bytes(b"another engine")
    with pytest.raises(PackageError, match=r"rank0\.engine changed since the build"):
        emit_repository(tmp_path / "package", config=config, build=build, checkpoint=converted_llama)
    assert not (tmp_path / "package").exists()
