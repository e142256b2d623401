"""A request as the `tensorrt_llm` model receives it: tensors by name, those of TensorRT-LLM 1.x and of v0.19.

Every input of that model is read here, or refused by name: none is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.runtime.errors import RequestError
from pipeline.runtime.request import Priority, Request
from pipeline.runtime.sampling import Sampling, Words

Tensor = npt.NDArray[Any]
Reader = Callable[[str, Tensor], Any]


def read_scalar(name: str, tensor: Tensor) -> Any:
    """The one value, as Python's own type."""
    if tensor.size != 1:
        raise RequestError(name, f"has the shape {list(tensor.shape)}", hint="give one value; requests come one by one")
    return tensor.reshape(-1)[0].item()


def read_tokens(name: str, tensor: Tensor) -> tuple[int, ...]:
    if tensor.ndim > 2 or (tensor.ndim == 2 and tensor.shape[0] != 1):
        raise RequestError(name, f"has the shape {list(tensor.shape)}", hint="give the tokens of one request")
    return tuple(tensor.reshape(-1).tolist())


def read_row(name: str, tensor: Tensor) -> npt.NDArray[np.float32] | None:
    """Numbers for one request; none at all stand for nothing, as preprocessing models send it."""
    return tensor.reshape(-1).astype(np.float32) if tensor.size else None


def read_words(name: str, tensor: Tensor) -> Words:
    """[2, n] or [1, 2, n]: the words' tokens one after another, filled up with 0, over the end of each word, filled up
    with -1."""
    if tensor.shape[-2:-1] != (2,) or tensor.size != 2 * tensor.shape[-1]:
        raise RequestError(name, f"has the shape {list(tensor.shape)}", hint="give [2, n]: tokens over the words' ends")
    tokens, offsets = tensor.reshape(2, -1).tolist()
    ends = [end for end in offsets if end >= 0]
    if ends != sorted(ends) or (ends and ends[-1] > len(tokens)) or offsets[: len(ends)] != ends:
        raise RequestError(name, f"has the word ends {offsets}", hint="they rise, and -1 fills the rest")
    # Where there are no words, one without tokens is sent.
    return tuple(tuple(tokens[start:end]) for start, end in zip([0, *ends], ends, strict=False) if end > start)


# Tensor -> field of Request or Sampling, how it is read.
REQUEST: dict[str, tuple[str, Reader]] = {
    "input_ids": ("input_ids", read_tokens),
    "request_output_len": ("max_tokens", read_scalar),
    "end_id": ("end_id", read_scalar),
    "pad_id": ("pad_id", read_scalar),
    "stop_words_list": ("stop_words", read_words),
    "num_return_sequences": ("num_return_sequences", read_scalar),
    "beam_width": ("beam_width", read_scalar),
    "return_log_probs": ("return_log_probs", read_scalar),
    "return_context_logits": ("return_context_logits", read_scalar),
    "return_generation_logits": ("return_generation_logits", read_scalar),
    "streaming": ("streaming", read_scalar),
    "exclude_input_in_output": ("exclude_input_in_output", read_scalar),
}
SAMPLING: dict[str, tuple[str, Reader]] = {
    "temperature": ("temperature", read_scalar),
    "runtime_top_k": ("top_k", read_scalar),
    "runtime_top_p": ("top_p", read_scalar),
    "runtime_top_p_min": ("top_p_min", read_scalar),
    "runtime_top_p_decay": ("top_p_decay", read_scalar),
    "runtime_top_p_reset_ids": ("top_p_reset_id", read_scalar),
    "repetition_penalty": ("repetition_penalty", read_scalar),
    "presence_penalty": ("presence_penalty", read_scalar),
    "frequency_penalty": ("frequency_penalty", read_scalar),
    "min_tokens": ("min_tokens", read_scalar),
    "min_length": ("min_tokens", read_scalar),
    "seed": ("seed", read_scalar),
    "random_seed": ("seed", read_scalar),
    "bad_words_list": ("bad_words", read_words),
    "embedding_bias": ("embedding_bias", read_row),
}
# Read by whoever answers, or without any effect on a request with one beam.
ELSEWHERE = frozenset(
    {"input_lengths", "stop", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"}
    | {"len_penalty", "early_stopping", "beam_search_diversity_rate"}
)
# Tensor -> what it is for, which is not served.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("encoder_input_features", "encoder_output_lengths"), "encoder-decoder models"),
    **dict.fromkeys(("decoder_input_ids", "decoder_input_lengths"), "encoder-decoder models"),
    **dict.fromkeys(("cross_attention_mask", "skip_cross_attn_blocks"), "encoder-decoder models"),
    **dict.fromkeys(("draft_input_ids", "draft_logits", "draft_acceptance_threshold"), "speculative decoding"),
    **dict.fromkeys(
        ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"), "lookahead decoding"
    ),
    **dict.fromkeys(("prompt_embedding_table", "prompt_table_extra_ids", "prompt_vocab_size"), "prompt tuning"),
    **dict.fromkeys(("mrope_rotary_cos_sin", "mrope_position_deltas"), "multimodal models"),
    **dict.fromkeys(("lora_task_id", "lora_weights", "lora_config"), "LoRA"),
    "context_phase_params": "disaggregated serving",
    **dict.fromkeys(("retention_token_range_starts", "retention_token_range_ends"), "cache retention"),
    **dict.fromkeys(("retention_token_range_priorities", "retention_token_range_durations_ms"), "cache retention"),
    **dict.fromkeys(("retention_decode_priority", "retention_decode_duration_ms"), "cache retention"),
    **dict.fromkeys(("guided_decoding_guide_type", "guided_decoding_guide"), "guided decoding"),
}


def read_request(
    tensors: Mapping[str, Tensor],
    *,
    request_id: str = "",
    priority: Priority = Priority.P1,
    queue_timeout: float | None = None,
    timeout: float | None = None,
) -> Request:
    """A request, without a batch dimension or with one of size 1. Raises RequestError, naming the tensor or field."""
    for name in tensors:
        if name in REFUSED:
            raise RequestError(name, f"is for {REFUSED[name]}, which is not served", hint="leave the tensor out")
        if name not in REQUEST and name not in SAMPLING and name not in ELSEWHERE:
            raise RequestError(name, "is not an input of tensorrt_llm")
    for name in ("input_ids", "request_output_len"):
        if name not in tensors:
            raise RequestError(name, "is missing")
    values = _read(REQUEST, tensors)
    if "input_lengths" in tensors:
        length = read_scalar("input_lengths", tensors["input_lengths"])
        if not 0 < length <= len(values["input_ids"]):
            raise RequestError("input_lengths", f"is {length}, and input_ids has {len(values['input_ids'])} tokens")
        values["input_ids"] = values["input_ids"][:length]
    return Request(
        **values,
        sampling=Sampling(**_read(SAMPLING, tensors)),
        request_id=request_id,
        priority=priority,
        queue_timeout=queue_timeout,
        timeout=timeout,
    )


def _read(table: Mapping[str, tuple[str, Reader]], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {field: read(name, tensors[name]) for name, (field, read) in table.items() if name in tensors}
