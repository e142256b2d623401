"""Settings of TensorRT-LLM's own executor (`stages.package.tensorrt_llm`), which serves flavour tensorrtllm. Names are
those of the parameters of its Triton backend, 1.2; what every executor has is under `stages.package` itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.section import Positive, Ratio, Section

NotNegative = Annotated[int, Field(ge=0)]


class TensorRTLLMServing(Section):
    """How TensorRT-LLM's executor serves the engine. null: its own default."""

    kv_cache_host_memory_bytes: NotNegative = Field(
        default=0, description="Host memory for KV cache blocks that the GPU has no room for; needs reuse."
    )
    kv_cache_onboard_blocks: bool = Field(
        default=True, description="Whether blocks on the host are copied back to the GPU before they are used."
    )
    max_attention_window_size: tuple[Positive, ...] = Field(
        default=(),
        description="Tokens that attention looks back on, by layer, repeated over the layers; empty: all of them.",
    )
    sink_token_length: NotNegative | None = Field(
        default=None, description="First tokens of a sequence that the window always keeps."
    )
    decoding_mode: Literal["top_k", "top_p", "top_k_top_p", "beam_search"] | None = Field(
        default=None, description="How tokens are chosen; null: top_k_top_p, or beam_search with beams."
    )
    normalize_log_probs: bool = Field(default=True, description="Divide cumulative log-probs by the length.")
    multi_block_mode: bool = Field(default=True, description="Split generation's attention over several blocks.")
    cuda_graph_mode: bool = Field(default=False, description="Generation steps as CUDA graphs.")
    cuda_graph_cache_size: NotNegative = Field(default=0, description="CUDA graphs that are kept.")
    gpu_weights_percent: Annotated[Ratio, Field(le=1)] = Field(
        default=1.0, description="Share of the weights on the GPU; below 1 needs stages.build.weight_streaming."
    )
    gpu_device_ids: tuple[NotNegative, ...] = Field(default=(), description="GPUs to use; empty: the first ones.")
    cancellation_check_period_ms: Positive = Field(default=100, description="How often cancels are looked for.")
    stats_check_period_ms: Positive = Field(default=100, description="How often metrics are updated.")
    max_queue_delay_microseconds: NotNegative = Field(
        default=0, description="How long Triton waits for more requests before it hands them on."
    )
    bls_instances: Positive | None = Field(
        default=None,
        description="Processes of tensorrt_llm_bls, each of which serves one request at a time; null: max_batch_size, "
        "16 at most.",
    )
