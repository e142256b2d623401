"""The compatibility rule of `stages.package` for flavour tensorrtllm: what its settings ask of an engine that is not
built for it. TensorRT-LLM's backend would find out at its start, or go on with a default."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.case import Case
from pipeline.config.rules import Rule
from pipeline.config.tensorrt_llm_rules import of_backend


def _find_unserved(case: Case) -> str | None:
    return "; ".join(_list_unserved(case)) or None


def _list_unserved(case: Case) -> Iterator[str]:
    from pipeline.engine.tensorrt_llm.request import is_paged

    build, package = case.build, case.config.stages.package
    own, ranks = package.tensorrt_llm, case.parallel.tensor * case.parallel.pipeline
    if package.enable_kv_cache_reuse and not is_paged(case.config):
        yield "enable_kv_cache_reuse needs paged context FMHA, which an INT8 KV cache turns off"
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
    Rule(
        "served_as_built",
        "stages.package",
        of_backend("tensorrt_llm", _find_unserved),
        "leave the setting out, or build for it",
    ),
)
