"""trtllm-build's arguments and BuildConfig, from one table: against the flags and fields of TensorRT-LLM 1.2's sources,
and against what a parser with those flags makes of the arguments."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields

import pytest

from pipeline.config.load import load_config
from pipeline.engine.tensorrt_llm.options import OPTIONS, build_config, list_arguments
from pipeline.engine.tensorrt_llm.request import EngineRequest, make_request
from tests.engine.tensorrt_llm import fake_trtllm_build as fake
from tests.engine.tensorrt_llm.gpu_host import REPOSITORY

# BuildConfig and PluginConfig (builder.py, plugin/plugin.py).
BUILD_FIELDS = {
    *("max_input_len", "max_seq_len", "opt_batch_size", "max_batch_size", "max_beam_width", "max_num_tokens"),
    *("opt_num_tokens", "max_prompt_embedding_table_size", "kv_cache_type", "gather_context_logits"),
    *("gather_generation_logits", "strongly_typed", "force_num_profiles", "profiling_verbosity"),
    *("enable_debug_output", "max_draft_len", "speculative_decoding_mode", "use_refit", "input_timing_cache"),
    *("output_timing_cache", "lora_config", "weight_sparsity", "weight_streaming", "plugin_config", "use_strip_plan"),
    *("max_encoder_input_len", "dry_run", "visualize_network", "monitor_memory", "use_mrope"),
}
PLUGIN_FIELDS = {*fake.PLUGINS, *fake.FEATURES, "tokens_per_block"}
# from_dict pops these without a default; kv_cache_type where there is a plugin_config.
REQUIRED = {
    *("max_input_len", "max_seq_len", "max_batch_size", "max_beam_width", "max_num_tokens", "opt_num_tokens"),
    "kv_cache_type",
}
GOLDEN = """
    --checkpoint_dir CHECKPOINT --output_dir OUTPUT --max_batch_size 8 --max_input_len 1023 --max_seq_len 1024
    --max_beam_width 1 --max_num_tokens 512 --kv_cache_type paged --profiling_verbosity layer_names_only
    --logits_dtype float32 --workers 1 --log_level info --gpt_attention_plugin auto --remove_input_padding enable
    --context_fmha enable --nccl_plugin auto --moe_plugin auto --gemm_plugin disable --gemm_swiglu_plugin disable
    --low_latency_gemm_plugin disable --low_latency_gemm_swiglu_plugin disable --gemm_allreduce_plugin disable
    --tokens_per_block 32 --use_paged_context_fmha enable --use_fp8_context_fmha enable --multiple_profiles disable
    --norm_quant_fusion disable --reduce_fusion disable --user_buffer disable --use_fused_mlp enable
"""
OWN = "stages.build.tensorrt_llm"


@pytest.fixture
def make(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    return lambda *settings, algo="FP8": make_request(load_config("h100-fp8-trtllm", settings), algo)


def test_the_arguments_of_the_example(make):
    assert list_arguments(make(), "CHECKPOINT", "OUTPUT") == shlex.split(GOLDEN)


def test_only_flags_and_fields_that_there_are():
    assert {option.name for option in OPTIONS} <= fake.FLAGS
    assert {option.name for option in OPTIONS if option.place == "build"} <= BUILD_FIELDS
    assert {option.name for option in OPTIONS if option.place == "plugin"} <= PLUGIN_FIELDS
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)


def test_every_source_is_a_field():
    known = {field.name for field in fields(EngineRequest)}
    assert {option.source for option in OPTIONS if option.source} <= known
    unused = known - {option.source for option in OPTIONS}
    assert unused == {"version", "image", "gpu", "sm", "parallel", "chunked_context"}  # of the runtime, not the build


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("stages.quantize.kv_cache=int8", "stages.package.enable_kv_cache_reuse=false"),
        ("stages.quantize.kv_cache=none", f"{OWN}.gemm_plugin=auto"),
        ("stages.build.weight_streaming=true", f"{OWN}.gather_context_logits=true", f"{OWN}.multiple_profiles=true"),
        (f"{OWN}.opt_num_tokens=256", f"{OWN}.max_beam_width=4", f"{OWN}.logits_dtype=float16"),
        ("target.parallel.tensor=2", f"{OWN}.reduce_fusion=true", f"{OWN}.gemm_swiglu_plugin=fp8"),
    ],
    ids=lambda settings: " ".join(settings) or "example",
)
def test_arguments_and_build_config_say_the_same(make, settings):
    """What the parser makes of the one is the other."""
    request = make(*settings)
    args = fake.make_parser().parse_args(list_arguments(request, "in", "out"))
    parsed, ours = fake.describe_build(args), json.loads(json.dumps(build_config(request)))
    plugins = ours.pop("plugin_config")
    assert {name: parsed["plugin_config"][name] for name in plugins} == plugins
    if ours["opt_num_tokens"] is None:
        del ours["opt_num_tokens"]
    assert {name: parsed[name] for name in ours} == ours
    assert args.logits_dtype == request.logits_dtype and args.max_seq_len == request.max_seq_len


def test_build_config_has_what_from_dict_wants(make):
    assert build_config(make()).keys() >= REQUIRED


def test_what_is_left_open_follows_from_model_and_cache(make):
    def read(*settings, algo="FP8"):
        request = make(*settings, algo=algo)
        return (
            request.use_paged_context_fmha,
            request.use_fp8_context_fmha,
            request.use_fused_mlp,
            request.max_input_len,
        )

    assert read() == (True, True, True, 1023)
    assert read("stages.quantize.kv_cache=none") == (True, False, True, 1023)
    assert read("stages.quantize.kv_cache=int8") == (False, False, True, 512)  # no chunks: a prompt is one step
    assert read(algo="W4A16_AWQ") == (True, False, False, 1023)
    assert read(algo="W4A8_AWQ") == (True, True, False, 1023)
    assert read(algo="MIXED_PRECISION") == (True, False, True, 1023)
    assert read(algo=None) == (True, False, True, 1023)
    assert read(f"{OWN}.chunked_context=false", f"{OWN}.max_input_len=100") == (True, True, True, 100)
    assert read(f"{OWN}.use_fp8_context_fmha=false", f"{OWN}.use_fused_mlp=false") == (True, False, False, 1023)
