"""What stages.package asks of an engine of TensorRT-LLM: each with a setting that breaks it and one that keeps it."""

from __future__ import annotations

import pytest

from pipeline.config.tensorrt_llm_serving_rules import TENSORRT_LLM_SERVING_RULES
from tests.config.test_compatibility import make_case

RULES = {rule.name: rule for rule in TENSORRT_LLM_SERVING_RULES}
PYTORCH = {"target.gpu": "H100", "target.backend": "llmapi"}
ENGINE = {"target.gpu": "H100", "target.backend": "tensorrt_llm"}
OWN, BUILT = "stages.package.tensorrt_llm", "stages.build.tensorrt_llm"
INT8_CACHE = {"stages.quantize.kv_cache": "int8"}
NO_REUSE = {"stages.package.enable_kv_cache_reuse": False}
HOST, WINDOW = f"{OWN}.kv_cache_host_memory_bytes", f"{OWN}.max_attention_window_size"
SETTINGS = [
    (INT8_CACHE, {**INT8_CACHE, **NO_REUSE}, "enable_kv_cache_reuse needs paged context FMHA"),
    ({HOST: 1 << 30, **NO_REUSE}, {HOST: 1 << 30}, "kv_cache_host_memory_bytes keeps blocks for reuse"),
    ({WINDOW: (512, 9000)}, {WINDOW: (512, 1024)}, "max_attention_window_size 9000 is more than max_seq_len 4096"),
    ({f"{OWN}.sink_token_length": 4}, {f"{OWN}.sink_token_length": 4, WINDOW: (512,)}, "belongs to a window"),
    (
        {f"{OWN}.decoding_mode": "beam_search"},
        {f"{OWN}.decoding_mode": "beam_search", f"{BUILT}.max_beam_width": 4},
        "max_beam_width above 1",
    ),
    (
        {f"{OWN}.gpu_weights_percent": 0.5},
        {f"{OWN}.gpu_weights_percent": 0.5, "stages.build.weight_streaming": True},
        "gpu_weights_percent below 1 needs stages.build.weight_streaming",
    ),
    (
        {f"{OWN}.gpu_device_ids": (0, 1)},
        {f"{OWN}.gpu_device_ids": (0, 1), "target.parallel.tensor": 2},
        "gpu_device_ids names 2 GPUs, and there are 1 ranks",
    ),
    (
        {"stages.package.max_tokens_in_paged_kv_cache": 4095},
        {"stages.package.max_tokens_in_paged_kv_cache": 4096},
        "max_tokens_in_paged_kv_cache 4095 cannot hold one sequence of max_seq_len 4096",
    ),
]


@pytest.mark.parametrize(("broken", "kept", "message"), SETTINGS)
def test_settings_beyond_the_engine_are_refused(broken: dict, kept: dict, message: str) -> None:
    rule = RULES["served_as_built"]
    found = rule.find(make_case({**ENGINE, **broken}))
    assert found is not None and message in found
    assert rule.find(make_case({**ENGINE, **kept})) is None


def test_they_are_no_concern_of_other_backends() -> None:
    rule = RULES["served_as_built"]
    assert rule.find(make_case({f"{OWN}.gpu_weights_percent": 0.5})) is None


@pytest.mark.parametrize(
    ("backend", "setting", "refused"),
    [
        (ENGINE, {"stages.package.interpreter_mode": "exact"}, "interpreter_mode: backend tensorrt_llm has no place"),
        (PYTORCH, {"stages.package.max_queue_size": 4}, "max_queue_size: backend llmapi has no place"),
        (ENGINE, {"stages.package.max_queue_size": 4}, None),
        (PYTORCH, {f"{OWN}.cuda_graph_mode": True}, "tensorrt_llm.cuda_graph_mode: backend llmapi"),
        (ENGINE, {f"{OWN}.cuda_graph_mode": True}, None),
        (PYTORCH, {HOST: 1 << 30}, None),
        ({}, {f"{OWN}.cuda_graph_mode": True, "stages.package.interpreter_mode": "exact"}, None),
    ],
)
def test_settings_without_a_place_are_refused(backend: dict, setting: dict, refused: str | None) -> None:
    found = RULES["served_with_a_place"].find(make_case({**backend, **setting}))
    assert (refused in found) if refused else found is None
