"""What is asked of `trtllm-build`: a config's limits and settings with nothing left open."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.engine.tensorrt_llm.versions import VERSION
from pipeline.quantization.catalog import MIXED
from pipeline.sharding.ranks import Parallel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config.schema import Config

FUSED = (None, "FP8", MIXED)  # quant_algo of models whose gated MLP trtllm-build fuses
FP8_ATTENTION = ("FP8", "W4A8_AWQ")  # … whose attention it lets compute in FP8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Resolved. Lengths in tokens; names of build settings are trtllm-build's own; `sm` as 90 for 9.0."""

    version: str
    image: str
    gpu: str
    sm: int
    parallel: Parallel
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    opt_num_tokens: int | None
    max_beam_width: int
    tokens_per_block: int
    chunked_context: bool
    use_paged_context_fmha: bool
    use_fp8_context_fmha: bool
    use_fused_mlp: bool
    multiple_profiles: bool
    reduce_fusion: bool
    user_buffer: bool
    norm_quant_fusion: bool
    gemm_plugin: str
    gemm_swiglu_plugin: str
    low_latency_gemm_plugin: str
    low_latency_gemm_swiglu_plugin: str
    gemm_allreduce_plugin: str
    logits_dtype: str
    gather_context_logits: bool
    gather_generation_logits: bool
    profiling_verbosity: str
    weight_streaming: bool
    workers: int
    log_level: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EngineRequest:
        """The reverse of `to_json`. Raises TypeError or KeyError for anything else."""
        return cls(**{**values, "parallel": Parallel(**values["parallel"])})


def is_paged(config: Config) -> bool:
    """Whether context attention reads the paged cache."""
    asked = config.stages.build.tensorrt_llm.use_paged_context_fmha
    return config.stages.quantize.kv_cache != "int8" if asked is None else asked


def is_chunked(config: Config) -> bool:
    """Whether prompts longer than a step are fed in chunks."""
    asked = config.stages.build.tensorrt_llm.chunked_context
    return is_paged(config) if asked is None else asked


def make_request(config: Config, algo: str | None = None) -> EngineRequest:
    """Of a config of backend tensorrt_llm that passed its rules. algo: the checkpoint's `quant_algo`, which decides
    what is left open of FP8 attention and the fused MLP; None: it is in 16 bits."""
    build, own = config.stages.build, config.stages.build.tensorrt_llm
    cache = config.stages.quantize.kv_cache
    chunked = is_chunked(config)
    longest = build.max_seq_len - 1
    resolved = {
        "chunked_context": chunked,
        "use_paged_context_fmha": is_paged(config),
        "use_fp8_context_fmha": _default(own.use_fp8_context_fmha, algo in FP8_ATTENTION and cache == "fp8"),
        "use_fused_mlp": _default(own.use_fused_mlp, algo in FUSED),
        "max_input_len": own.max_input_len or (longest if chunked else min(longest, build.max_num_tokens)),
    }
    return EngineRequest(
        version=VERSION,
        gpu=config.target.gpu,
        sm=config.target.device.sm,
        parallel=config.target.parallel.sizes,
        max_batch_size=build.max_batch_size,
        max_seq_len=build.max_seq_len,
        max_num_tokens=build.max_num_tokens,
        tokens_per_block=build.block_size,
        weight_streaming=build.weight_streaming,
        **{**own.model_dump(), **resolved},
    )


def _default(asked: bool | None, otherwise: bool) -> bool:
    return otherwise if asked is None else asked
