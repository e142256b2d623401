"""The tensors that a `tensorrt_llm` request may have, by what becomes of each. Names are TensorRT-LLM 1.2's."""

from __future__ import annotations

from pipeline.triton.backend import retention

# Tensor -> field of Request.
REQUEST_FIELDS = {
    "request_output_len": ("max_tokens", int),
    "end_id": ("end_id", int),
    "pad_id": ("pad_id", int),
    "num_return_sequences": ("num_return_sequences", int),
    "beam_width": ("beam_width", int),
    "return_log_probs": ("return_log_probs", bool),
    "return_context_logits": ("return_context_logits", bool),
    "return_generation_logits": ("return_generation_logits", bool),
    "streaming": ("streaming", bool),
    "exclude_input_in_output": ("exclude_input_in_output", bool),
}
# Tensor -> field of Sampling.
SAMPLING_FIELDS = {
    "temperature": ("temperature", float),
    "runtime_top_k": ("top_k", int),
    "runtime_top_p": ("top_p", float),
    "runtime_top_p_min": ("top_p_min", float),
    "runtime_top_p_decay": ("top_p_decay", float),
    "runtime_top_p_reset_ids": ("top_p_reset_id", int),
    "repetition_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
    "min_tokens": ("min_tokens", int),
    "seed": ("seed", int),
}
# What an ensemble of TensorRT-LLM's always sends, and beam search's own, without effect on one beam.
IGNORED = frozenset(
    [
        "decoder_input_ids",
        "decoder_input_lengths",
        "prompt_table_extra_ids",
        "len_penalty",
        "early_stopping",
        "beam_search_diversity_rate",
    ]
)
KNOWN = frozenset(
    [
        "input_ids",
        "input_lengths",
        "stop_words_list",
        "bad_words_list",
        "embedding_bias",
        "stop",
        "return_perf_metrics",
        "return_num_input_tokens",
        "return_num_output_tokens",
        *retention.TENSORS,
    ]
)
SERVED = REQUEST_FIELDS.keys() | SAMPLING_FIELDS.keys() | KNOWN
# Tensor -> what it is for, which is not served.
REFUSED = {
    **dict.fromkeys(("encoder_input_features", "encoder_output_lengths"), "encoder-decoder models"),
    **dict.fromkeys(("cross_attention_mask", "skip_cross_attn_blocks"), "encoder-decoder models"),
    **dict.fromkeys(("draft_input_ids", "draft_logits", "draft_acceptance_threshold"), "speculative decoding"),
    **dict.fromkeys(
        ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"), "lookahead decoding"
    ),
    **dict.fromkeys(("prompt_embedding_table", "prompt_vocab_size"), "prompt tuning"),
    **dict.fromkeys(("mrope_rotary_cos_sin", "mrope_position_deltas"), "multimodal models"),
    **dict.fromkeys(("lora_task_id", "lora_weights", "lora_config"), "LoRA"),
    "context_phase_params": "disaggregated serving",
    **dict.fromkeys(("guided_decoding_guide_type", "guided_decoding_guide"), "guided decoding"),
}
# Field of the executor's errors -> the tensor that a client knows it by.
TENSOR_OF = {
    **{field: tensor for tensor, (field, _) in (*REQUEST_FIELDS.items(), *SAMPLING_FIELDS.items())},
    "stop_words": "stop_words_list",
    "bad_words": "bad_words_list",
    "stop_words or bad_words": "stop_words_list or bad_words_list",
    **retention.TENSOR_OF,
}
