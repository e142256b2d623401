"""The parameters of TensorRT-LLM's C++ backend (1.2), from the config and from what was asked of the engine.

Its GetParameter falls back to a default, with no more than a warning, where a value does not parse: so each is typed in
the config, and what is null is left out. What the engine cannot do is refused by config/tensorrt_llm_serving_rules.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.engine.tensorrt_llm.request import EngineRequest

WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"  # in NVIDIA's images
# Processes of tensorrt_llm_bls beyond which memory goes for little: each waits for tokens most of the time.
MOST_BLS = 16


def list_parameters(config: Config, request: EngineRequest, *, engine: str, tokenizer: str) -> dict[str, object]:
    """By name; None for those left to the backend. `engine`, `tokenizer`: folders as the server finds them."""
    package, own = config.stages.package, config.stages.package.tensorrt_llm
    return {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": engine,
        "tokenizer_dir": tokenizer,
        "executor_worker_path": WORKER,
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "max_beam_width": request.max_beam_width,
        "batch_scheduler_policy": package.batch_scheduler_policy,
        "enable_chunked_context": request.chunked_context,
        "enable_kv_cache_reuse": package.enable_kv_cache_reuse,
        "kv_cache_free_gpu_mem_fraction": package.kv_cache_free_gpu_mem_fraction,
        "max_tokens_in_paged_kv_cache": package.max_tokens_in_paged_kv_cache,
        "kv_cache_host_memory_bytes": own.kv_cache_host_memory_bytes,
        "kv_cache_onboard_blocks": own.kv_cache_onboard_blocks,
        "max_attention_window_size": ",".join(map(str, own.max_attention_window_size)) or None,
        "sink_token_length": own.sink_token_length,
        "decoding_mode": own.decoding_mode,
        "normalize_log_probs": own.normalize_log_probs,
        "exclude_input_in_output": False,  # unless a request says so
        "multi_block_mode": own.multi_block_mode,
        "cuda_graph_mode": own.cuda_graph_mode,
        "cuda_graph_cache_size": own.cuda_graph_cache_size,
        "gpu_weights_percent": own.gpu_weights_percent,
        "gpu_device_ids": ",".join(map(str, own.gpu_device_ids)) or None,
        "cancellation_check_period_ms": own.cancellation_check_period_ms,
        "stats_check_period_ms": own.stats_check_period_ms,
    }


def count_bls(config: Config, request: EngineRequest) -> int:
    """Processes of tensorrt_llm_bls."""
    return config.stages.package.tensorrt_llm.bls_instances or min(request.max_batch_size, MOST_BLS)
