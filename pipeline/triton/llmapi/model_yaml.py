"""model.yaml: the arguments of TensorRT-LLM's LLM(), as its Triton model `llmapi` reads them, from the same config.

Names: tensorrt_llm/llmapi/llm_args.py (TorchLlmArgs, KvCacheConfig, SchedulerConfig), which refuses unknown ones. Sizes
are always stated: its defaults are for benchmarks (2048 sequences, prompts of 1024 tokens).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.config.schema import Config

POLICIES = {"guaranteed_no_evict": "GUARANTEED_NO_EVICT", "max_utilization": "MAX_UTILIZATION"}
CACHE_DTYPES = {"none": "auto", "fp8": "fp8"}  # stages.quantize.kv_cache -> kv_cache_config.dtype


def list_arguments(config: Config, *, model: str, routed: bool) -> dict[str, Any]:
    """`model`: the checkpoint's folder, from where the server is started; `routed`: whether the model has experts."""
    build, package, parallel = config.stages.build, config.stages.package, config.target.parallel
    own = package.tensorrt_llm
    spread = {
        "moe_expert_parallel_size": parallel.expert,
        "moe_tensor_parallel_size": parallel.tensor // parallel.expert,
    }
    return {
        "model": model,
        "backend": "pytorch",
        "dtype": config.stages.convert.dtype or "auto",
        "trust_remote_code": False,
        "tensor_parallel_size": parallel.tensor,
        "pipeline_parallel_size": parallel.pipeline,
        **(spread if routed else {}),
        "max_batch_size": build.max_batch_size,
        "max_num_tokens": build.max_num_tokens,
        "max_seq_len": build.max_seq_len,
        "max_input_len": build.max_seq_len - 1,
        "max_beam_width": 1,
        "enable_chunked_prefill": True,
        "kv_cache_config": _drop_unset(
            {
                "enable_block_reuse": package.enable_kv_cache_reuse,
                "free_gpu_memory_fraction": package.kv_cache_free_gpu_mem_fraction,
                "max_tokens": package.max_tokens_in_paged_kv_cache,
                "tokens_per_block": build.block_size,
                "dtype": CACHE_DTYPES[config.stages.quantize.kv_cache],
                "host_cache_size": own.kv_cache_host_memory_bytes or None,
                "onboard_blocks": own.kv_cache_onboard_blocks,
                "max_attention_window": list(own.max_attention_window_size) or None,
                "sink_token_length": own.sink_token_length,
            }
        ),
        "scheduler_config": {"capacity_scheduler_policy": POLICIES[package.batch_scheduler_policy]},
        # Triton batches nothing here: the LLM API does, over all requests that are in flight.
        "triton_config": {
            "max_batch_size": 0,
            "decoupled": True,
            "cancellation_check_period_ms": own.cancellation_check_period_ms,
        },
    }


def _drop_unset(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
