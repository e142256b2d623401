"""The compatibility rules of `stages.package` for flavours tensorrtllm and llmapi: what its settings ask of an engine
that is not built for it, where TensorRT-LLM's backend would find out at its start or go on with a default, and what the
flavour has no place for."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.case import Case
from pipeline.config.rules import Rule
from pipeline.config.tensorrt_llm_rules import of_backend, of_both
from pipeline.engine.tensorrt_llm.request import is_paged

# Of trtseek's own executor.
OWN = ("runner", "interpreter_mode")
# Of Triton's queue and text models, which the LLM API has none of: it tokenizes, waits and batches itself.
TRITONS = (
    "max_queue_size",
    "add_special_tokens",
    "skip_special_tokens",
    "preprocessing_instances",
    "postprocessing_instances",
)
# Under stages.package.tensorrt_llm: what the LLM API has too.
SHARED = (
    "kv_cache_host_memory_bytes",
    "kv_cache_onboard_blocks",
    "max_attention_window_size",
    "sink_token_length",
    "cancellation_check_period_ms",
)


def _find_homeless(case: Case) -> str | None:
    package, backend = case.config.stages.package, case.config.target.backend
    own = package.tensorrt_llm
    keys = [*OWN, *(TRITONS if backend == "llmapi" else ())]
    set_ = [key for key in keys if package.changes(key)]
    if backend == "llmapi":
        set_ += [f"tensorrt_llm.{key}" for key in type(own).model_fields if key not in SHARED and own.changes(key)]
    return f"{', '.join(set_)}: backend {backend} has no place for it" if set_ else None


def _find_unserved(case: Case) -> str | None:
    return "; ".join(_list_unserved(case)) or None


def _list_unserved(case: Case) -> Iterator[str]:
    build, package = case.build, case.config.stages.package
    own, ranks = package.tensorrt_llm, case.parallel.tensor * case.parallel.pipeline
    if package.enable_kv_cache_reuse and not is_paged(case.config):
        yield "enable_kv_cache_reuse needs paged context FMHA, which an INT8 KV cache turns off: set it to false"
    if own.kv_cache_host_memory_bytes and not package.enable_kv_cache_reuse:
        yield "kv_cache_host_memory_bytes keeps blocks for reuse, and enable_kv_cache_reuse is false"
    if beyond := [window for window in own.max_attention_window_size if window > build.max_seq_len]:
        yield f"max_attention_window_size {beyond[0]} is more than max_seq_len {build.max_seq_len}"
    if own.sink_token_length and not own.max_attention_window_size:
        yield "sink_token_length belongs to a window, and max_attention_window_size is empty"
    if own.decoding_mode == "beam_search" and build.tensorrt_llm.max_beam_width == 1:
        yield "decoding_mode beam_search needs stages.build.tensorrt_llm.max_beam_width above 1"
    if own.gpu_weights_percent < 1 and not build.weight_streaming:
        yield "gpu_weights_percent below 1 needs stages.build.weight_streaming"
    if own.gpu_device_ids and len(own.gpu_device_ids) != ranks:
        yield f"gpu_device_ids names {len(own.gpu_device_ids)} GPUs, and there are {ranks} ranks"
    tokens = package.max_tokens_in_paged_kv_cache
    if tokens is not None and tokens < build.max_seq_len:
        yield f"max_tokens_in_paged_kv_cache {tokens} cannot hold one sequence of max_seq_len {build.max_seq_len}"


TENSORRT_LLM_SERVING_RULES: tuple[Rule, ...] = (
    Rule("served_with_a_place", "stages.package", of_both(_find_homeless), "leave it out"),
    Rule(
        "served_as_built",
        "stages.package",
        of_backend("tensorrt_llm", _find_unserved),
        "change the setting, or build for it",
    ),
)
