"""The compatibility rules of `stages.build.tensorrt_llm`: what trtllm-build refuses, or changes without asking."""

from __future__ import annotations

from pipeline.config.case import Case
from pipeline.config.rules import Rule
from pipeline.config.tensorrt_llm_rules import of_backend
from pipeline.engine.tensorrt_llm.request import FUSED, is_chunked
from pipeline.engine.tensorrt_llm.versions import judge
from pipeline.quantization.catalog import name_algo


def _find_paged_attention(case: Case) -> str | None:
    """What reads the paged cache during the context phase, and what needs that."""
    own, is_int8 = case.build.tensorrt_llm, case.quantize.kv_cache == "int8"
    if own.use_paged_context_fmha and is_int8:
        return "use_paged_context_fmha: it cannot read an INT8 KV cache"
    if own.use_paged_context_fmha is not False and not is_int8:
        return None
    why = "an INT8 KV cache turns paged context FMHA off" if is_int8 else "use_paged_context_fmha is off"
    return f"chunked_context: {why}, which feeds prompts in chunks" if own.chunked_context else None


def _find_fp8_attention(case: Case) -> str | None:
    if not case.build.tensorrt_llm.use_fp8_context_fmha or case.quantize.kv_cache == "fp8":
        return None
    return "use_fp8_context_fmha: it needs an FP8 KV cache"


def _find_long_prompts(case: Case) -> str | None:
    build, own = case.build, case.build.tensorrt_llm
    if own.max_input_len is None:
        return None
    if own.max_input_len >= build.max_seq_len:
        return f"max_input_len {own.max_input_len} leaves no answer within max_seq_len {build.max_seq_len}"
    if own.max_input_len > build.max_num_tokens and not is_chunked(case.config):
        return (
            f"max_input_len {own.max_input_len} is more than max_num_tokens {build.max_num_tokens}, and prompts are "
            "not fed in chunks"
        )
    return None


def _find_rows(case: Case) -> str | None:
    build, beams = case.build, case.build.tensorrt_llm.max_beam_width
    most = build.max_batch_size * build.max_seq_len
    if build.max_num_tokens > most:
        return (
            f"{build.max_num_tokens} rows are more than max_batch_size x max_seq_len, {most}: TensorRT-LLM lowers them"
        )
    if build.max_num_tokens < build.block_size:
        return f"{build.max_num_tokens} rows are fewer than a block's {build.block_size} tokens"
    if build.max_num_tokens < build.max_batch_size * beams:
        return f"{build.max_num_tokens} rows hold no token of each of {build.max_batch_size} x {beams} beams"
    return None


def _find_plugins(case: Case) -> str | None:
    """What trtllm-build raises on, hours after the config was written."""
    own, formats = case.build.tensorrt_llm, case.formats
    fused = own.use_fused_mlp is not False
    problems = {
        "user_buffer needs reduce_fusion": own.user_buffer and not own.reduce_fusion,
        "reduce_fusion needs target.parallel.tensor above 1": own.reduce_fusion and case.parallel.tensor == 1,
        "gemm_swiglu_plugin needs FP8 weights and use_fused_mlp": own.gemm_swiglu_plugin != "disable"
        and not (fused and formats == ["fp8"]),
        "low_latency_gemm_swiglu_plugin needs FP8 weights and use_fused_mlp": own.low_latency_gemm_swiglu_plugin
        != "disable"
        and not (fused and formats == ["fp8"]),
        "low_latency_gemm_plugin needs FP8 weights": own.low_latency_gemm_plugin != "disable" and formats != ["fp8"],
        "use_fused_mlp is for weights in 16 bits, FP8 or mixed precision": own.use_fused_mlp
        and name_algo(formats) not in FUSED,
        "multiple_profiles leaves no choice of opt_num_tokens": own.multiple_profiles
        and own.opt_num_tokens is not None,
        f"opt_num_tokens {own.opt_num_tokens} is more than max_num_tokens": (own.opt_num_tokens or 0)
        > case.build.max_num_tokens,
    }
    return "; ".join(problem for problem, is_there in problems.items() if is_there) or None


def _find_image(case: Case) -> str | None:
    verdict = judge(None, case.build.tensorrt_llm.image)
    return None if verdict.fits else verdict.reason


_ENGINE = "tensorrt_llm"
TENSORRT_LLM_BUILD_RULES: tuple[Rule, ...] = (
    Rule(
        "paged_attention_reads",
        "stages.build.tensorrt_llm",
        of_backend(_ENGINE, _find_paged_attention),
        "take kv_cache: fp8 or none, or leave the setting out",
    ),
    Rule(
        "fp8_attention_needs_cache",
        "stages.build.tensorrt_llm.use_fp8_context_fmha",
        of_backend(_ENGINE, _find_fp8_attention),
        "set stages.quantize.kv_cache: fp8, or leave use_fp8_context_fmha out",
    ),
    Rule(
        "prompts_fit",
        "stages.build.tensorrt_llm.max_input_len",
        of_backend(_ENGINE, _find_long_prompts),
        "lower max_input_len, or raise max_num_tokens",
    ),
    Rule("rows_of_engine", "stages.build.max_num_tokens", of_backend(_ENGINE, _find_rows), "change max_num_tokens"),
    Rule(
        "plugins_agree",
        "stages.build.tensorrt_llm",
        of_backend(_ENGINE, _find_plugins),
        "change them, or leave them out",
    ),
    Rule(
        "image_has_engines",
        "stages.build.tensorrt_llm.image",
        of_backend(_ENGINE, _find_image),
        "leave image out, or take one of the table's",
    ),
)
