"""The package for the LLM API: the checkpoint, and every option of the config under LLM()'s own names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.schema import Config
from pipeline.errors import PackageError
from pipeline.triton.llmapi.model_yaml import list_arguments
from pipeline.triton.llmapi.repository import emit_repository

# Of TorchLlmArgs (1.3), KvCacheConfig and SchedulerConfig: LLM() refuses others.
ARGUMENTS = {
    "model", "tokenizer", "backend", "dtype", "trust_remote_code", "tensor_parallel_size", "pipeline_parallel_size",
    "moe_expert_parallel_size", "moe_tensor_parallel_size", "max_batch_size", "max_num_tokens", "max_seq_len",
    "max_input_len", "max_beam_width", "enable_chunked_prefill", "kv_cache_config", "scheduler_config",
}  # fmt: skip
CACHE = {
    "enable_block_reuse", "max_tokens", "max_attention_window", "sink_token_length", "free_gpu_memory_fraction",
    "host_cache_size", "onboard_blocks", "dtype", "tokens_per_block",
}  # fmt: skip


def make_config(settings: Mapping[str, Any] | None = None) -> Config:
    values: dict[str, Any] = {"name": "test", "model": {"path": "m"}, "target": {"gpu": "H100", "backend": "llmapi"}}
    for key, value in (settings or {}).items():
        *above, last = key.split(".")
        section = values
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    return Config.model_validate(values, strict=False)


def tell(settings: Mapping[str, Any] | None = None, *, routed: bool = False) -> dict[str, Any]:
    return list_arguments(make_config(settings), model="artifacts/checkpoint", routed=routed)


def test_llm_is_told_what_it_knows() -> None:
    told = tell()
    assert told.keys() - {"triton_config"} <= ARGUMENTS
    assert told["kv_cache_config"].keys() <= CACHE
    assert told["triton_config"] == {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 100}
    assert (told["backend"], told["trust_remote_code"]) == ("pytorch", False)


@pytest.mark.parametrize(
    ("settings", "place", "value"),
    [
        ({"stages.build.max_batch_size": 3}, "max_batch_size", 3),
        ({"stages.build.max_num_tokens": 300}, "max_num_tokens", 300),
        ({"stages.build.max_seq_len": 700}, "max_seq_len", 700),
        ({"stages.build.max_seq_len": 700}, "max_input_len", 699),
        ({"stages.build.block_size": 128}, "kv_cache_config.tokens_per_block", 128),
        ({"stages.convert.dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"target.parallel": {"tensor": 4, "expert": 2}}, "tensor_parallel_size", 4),
        ({"target.parallel": {"pipeline": 2}}, "pipeline_parallel_size", 2),
        ({"stages.quantize.kv_cache": "fp8"}, "kv_cache_config.dtype", "fp8"),
        ({"stages.package.enable_kv_cache_reuse": False}, "kv_cache_config.enable_block_reuse", False),
        ({"stages.package.kv_cache_free_gpu_mem_fraction": 0.5}, "kv_cache_config.free_gpu_memory_fraction", 0.5),
        ({"stages.package.max_tokens_in_paged_kv_cache": 9000}, "kv_cache_config.max_tokens", 9000),
        (
            {"stages.package.batch_scheduler_policy": "max_utilization"},
            "scheduler_config.capacity_scheduler_policy",
            "MAX_UTILIZATION",
        ),
        ({"stages.package.tensorrt_llm.kv_cache_host_memory_bytes": 64}, "kv_cache_config.host_cache_size", 64),
        ({"stages.package.tensorrt_llm.kv_cache_onboard_blocks": False}, "kv_cache_config.onboard_blocks", False),
        ({"stages.package.tensorrt_llm.max_attention_window_size": [9]}, "kv_cache_config.max_attention_window", [9]),
        ({"stages.package.tensorrt_llm.sink_token_length": 4}, "kv_cache_config.sink_token_length", 4),
        (
            {"stages.package.tensorrt_llm.cancellation_check_period_ms": 9},
            "triton_config.cancellation_check_period_ms",
            9,
        ),
    ],
)
def test_settings_have_their_place(settings: dict[str, Any], place: str, value: Any) -> None:
    def find(told: Any) -> Any:
        for key in place.split("."):
            told = told.get(key)
        return told

    assert find(tell(settings)) == value
    assert find(tell()) != value


def test_experts_are_spread_over_the_tensor_group() -> None:
    settings = {"target.parallel": {"tensor": 4, "expert": 2}}
    told = tell(settings, routed=True)
    assert (told["moe_expert_parallel_size"], told["moe_tensor_parallel_size"]) == (2, 2)
    assert "moe_expert_parallel_size" not in tell(settings)


def test_a_package(llama_path: Path, tmp_path: Path) -> None:
    linked: dict[str, str] = {}
    emit_repository(
        tmp_path / "package",
        config=make_config(),
        checkpoint=llama_path,
        on_link=lambda file, digest: linked.update({file.name: digest}),
    )
    told = yaml.safe_load((tmp_path / "package/model_repository/tensorrt_llm/1/model.yaml").read_text())
    checkpoint = tmp_path / "package" / told["model"]
    assert {file.name for file in checkpoint.iterdir()} == linked.keys() == {f.name for f in llama_path.iterdir()}
    assert (checkpoint / "config.json").samefile(llama_path / "config.json")
    assert "ranks=1\n" in (tmp_path / "package" / "launch.sh").read_text()


def test_a_checkpoint_without_tokenizer(llama_path: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in llama_path.iterdir():
        if "token" not in file.name:
            (bare / file.name).symlink_to(file)
    with pytest.raises(PackageError, match="has no tokenizer"):
        emit_repository(tmp_path / "package", config=make_config(), checkpoint=bare)
