"""Settings that only TensorRT-LLM's engines have (`stages.build.tensorrt_llm`). Names and defaults are those of
`trtllm-build` 1.2; limits that every backend has (batch, lengths, tokens per block) are under `stages.build` itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.section import Positive, Section

IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"


class TensorRTLLM(Section):
    """TensorRT-LLM's own build settings. null: what the model, the KV cache and the limits ask for."""

    image: Annotated[str, Field(pattern=r"^[\w./:-]+:[\w.-]+(@sha256:[0-9a-f]{64})?$")] = Field(
        default=IMAGE,
        description="Container that builds the engine and serves it; its release must carry an engine backend. Pin it "
        "by appending @sha256:….",
    )
    max_input_len: Positive | None = Field(
        default=None, description="Longest prompt, in tokens; null: what the scheduler can feed."
    )
    opt_num_tokens: Positive | None = Field(
        default=None, description="Rows of a step that kernels are chosen for; null: max_batch_size x max_beam_width."
    )
    max_beam_width: Positive = Field(default=1, description="Beams of one request, at most.")
    chunked_context: bool | None = Field(
        default=None,
        description="Feed prompts longer than max_num_tokens in chunks; null: wherever paged context FMHA is on.",
    )
    use_paged_context_fmha: bool | None = Field(
        default=None,
        description="Context attention over the paged cache, for chunked context and KV cache reuse; null: unless the "
        "cache is INT8, which it cannot read.",
    )
    use_fp8_context_fmha: bool | None = Field(
        default=None, description="Context attention in FP8; null: with FP8 weights and an FP8 cache."
    )
    use_fused_mlp: bool | None = Field(
        default=None,
        description="Both halves of the gated MLP as one GEMM; null: of weights in 16 bits, FP8 or mixed "
        "precision, which are all that trtllm-build fuses.",
    )
    multiple_profiles: bool = Field(default=False, description="Several optimization profiles: builds longer.")
    reduce_fusion: bool = Field(default=False, description="Fuse all-reduce, residual and norm (Llama, tensor > 1).")
    user_buffer: bool = Field(default=False, description="No copy before the all-reduce (FP8 Llama, reduce_fusion).")
    norm_quant_fusion: bool = Field(default=False, description="Fuse norms and the quantization after them.")
    gemm_plugin: Literal["auto", "float16", "bfloat16", "float32", "fp8", "disable"] = Field(
        default="disable", description="cuBLASLt for GEMMs that are not quantized (fp8: for FP8 ones)."
    )
    gemm_swiglu_plugin: Literal["fp8", "disable"] = Field(
        default="disable", description="Gated MLP and SwiGLU as one kernel: FP8 on Hopper."
    )
    low_latency_gemm_plugin: Literal["fp8", "disable"] = Field(default="disable", description="FP8 GEMMs for few rows.")
    low_latency_gemm_swiglu_plugin: Literal["fp8", "disable"] = Field(
        default="disable", description="The same, with SwiGLU."
    )
    gemm_allreduce_plugin: Literal["float16", "bfloat16", "disable"] = Field(
        default="disable", description="GEMM and all-reduce as one kernel."
    )
    logits_dtype: Literal["float32", "float16"] = Field(default="float32", description="Type of the logits.")
    gather_context_logits: bool = Field(default=False, description="Keep the logits of every prompt token.")
    gather_generation_logits: bool = Field(default=False, description="Keep the logits of every generated token.")
    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] = Field(
        default="layer_names_only", description="What the engine tells of its layers."
    )
    workers: Positive = Field(default=1, description="Ranks built at once, each on a GPU of its own.")
    log_level: Literal["verbose", "info", "warning", "error"] = Field(default="info", description="Of trtllm-build.")
