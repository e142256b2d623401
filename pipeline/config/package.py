"""Settings of the stage `package`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.section import Positive, Section
from pipeline.config.tensorrt_llm_serving import TensorRTLLMServing


class Package(Section):
    """The Triton model repository."""

    flavour: Literal["trtseek", "tensorrtllm", "llmapi"] | None = Field(
        default=None, description="What serves the model; null: as target.backend needs, which no other may contradict."
    )
    kv_cache_free_gpu_mem_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.9, description="Share of the GPU memory left after the engine that the KV pool takes."
    )
    max_tokens_in_paged_kv_cache: Positive | None = Field(
        default=None, description="Upper limit of the KV pool in tokens; null: only the fraction limits it."
    )
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = Field(
        default="guaranteed_no_evict",
        description="Start a request only if its longest answer has blocks, or when its prompt fits and pause others.",
    )
    enable_kv_cache_reuse: bool = Field(
        default=True, description="Whether requests with the same beginning share its KV cache blocks."
    )
    max_queue_size: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Waiting requests of each priority class, at most; 0: no limit.",
    )
    runner: Literal["auto", "engine", "interpreter"] = Field(
        default="auto", description="What runs the network: the engine on a GPU, the interpreter on the CPU."
    )
    interpreter_mode: Literal["fast", "declared", "exact"] = Field(
        default="fast", description="Arithmetic of the interpreter; exact gives the same tokens in any batch."
    )
    add_special_tokens: bool = Field(
        default=True, description="Whether preprocessing adds BOS; false for prompts rendered by a chat template."
    )
    skip_special_tokens: bool = Field(
        default=True,
        description="Whether postprocessing drops special tokens from the text.",
    )
    check: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Load the package in a tritonserver and send one request. auto: if one is installed and the model "
        "fits in free memory. Changes no byte of the package.",
    )
    preprocessing_instances: Positive = Field(default=1, description="Tokenizer processes.")
    postprocessing_instances: Positive = Field(default=1, description="Detokenizer processes.")
    tensorrt_llm: TensorRTLLMServing = Field(
        default=TensorRTLLMServing(), description="What only flavour tensorrtllm has."
    )
