"""Rules of backends tensorrt_llm and llmapi: each with settings that break it and settings that keep it."""

import pytest

from pipeline.config.backends import LLMAPI_EXPORTS
from pipeline.config.compatibility import check_compatibility
from pipeline.config.gpus import supported_sms
from pipeline.config.tensorrt_llm_build_rules import TENSORRT_LLM_BUILD_RULES
from pipeline.config.tensorrt_llm_rules import TENSORRT_LLM_RULES
from pipeline.engine.tensorrt_llm.support import LIMITS
from pipeline.errors import CompatibilityError
from pipeline.exports import hf, modelopt
from tests.config.test_compatibility import CODER, V2_LITE, make_case

RULES = {rule.name: rule for rule in (*TENSORRT_LLM_RULES, *TENSORRT_LLM_BUILD_RULES)}
ENGINE = {"target.gpu": "H100", "target.backend": "tensorrt_llm"}
PYTORCH = {"target.gpu": "H100", "target.backend": "llmapi"}
FP8 = {**ENGINE, "stages.quantize.method": "fp8"}
OWN = "stages.build.tensorrt_llm"

# DeepSeek-MoE-16B, near enough: V2-Lite's experts under Llama's attention.
MOE = {
    **{key: value for key, value in V2_LITE.items() if "lora" not in key and "head_dim" not in key},
    "architectures": ["DeepseekForCausalLM"],
    "rope_scaling": None,
    "max_position_embeddings": 4096,
}

# rule, settings that break it, settings that keep it, a piece of the message
SETTINGS = [
    (
        "flavour_of_backend",
        {**ENGINE, "stages.package.flavour": "trtseek"},
        {**ENGINE, "stages.package.flavour": "tensorrtllm"},
        "flavour trtseek does not serve what backend tensorrt_llm makes, which is tensorrtllm's",
    ),
    ("flavour_of_backend", {"stages.package.flavour": "llmapi"}, {"stages.package.flavour": "trtseek"}, "trtseek's"),
    (
        "own_settings",
        {**PYTORCH, "stages.build.weights": "stripped", "stages.build.max_blocks": 900},
        {"stages.build.weights": "stripped"},
        "max_blocks, weights: of trtseek's own network, which llmapi does not use",
    ),
    (
        "engines_in_16_bits",
        {**ENGINE, "stages.convert.dtype": "float32"},
        {**PYTORCH, "stages.convert.dtype": "float32"},
        "float32",
    ),
    (
        "no_fp8_blocks",
        {**ENGINE, "stages.quantize.method": "fp8_blocks"},
        {**PYTORCH, "stages.quantize.method": "fp8_blocks"},
        "is FP8 in 128 x 128 blocks, which only its PyTorch backend takes",
    ),
    (
        "no_integers_on_blackwell",
        {**ENGINE, "target.gpu": "B200"},
        {**ENGINE, "target.gpu": "RTX-5090"},
        "int4 on SM100: INT8 and INT4 are what TensorRT-LLM's builder refuses from SM100 to SM119",
    ),
    (
        "mixed_precision",
        {**ENGINE, "stages.quantize.recipe": {"rows": [{"pattern": "*.attention.dense", "method": "int8"}]}},
        {**ENGINE, "stages.quantize.recipe": {"rows": [{"pattern": "*.attention.dense", "method": "fp8"}]}},
        "INT8 weights (method int8) beside int4",
    ),
    (
        "auto_is_mixed",
        {**ENGINE, "stages.quantize.recipe": {"auto": True}},
        {
            **ENGINE,
            "stages.quantize.recipe": {"auto": True},
            "stages.quantize.sensitivity": {"formats": ["int4", "fp8"]},
        },
        "auto may choose int8 and fp8_blocks",
    ),
    (
        "loaded_in_pytorch",
        {**PYTORCH, "stages.quantize.method": "smoothquant"},
        {**PYTORCH, "stages.quantize.method": "fp8_blocks"},
        "int8_sq is not exported to what the PyTorch backend reads; int4, fp8, fp8_blocks are",
    ),
    (
        "loaded_in_pytorch",
        {**PYTORCH, "stages.quantize.recipe": {"rows": [{"pattern": "*.mlp.fc", "method": "fp8_blocks"}]}},
        {**PYTORCH, "stages.quantize.recipe": {"rows": [{"pattern": "*.mlp.fc", "method": "fp8"}]}},
        "no one checkpoint that the PyTorch backend reads has both",
    ),
    (
        "no_int8_cache",
        {**PYTORCH, "stages.quantize.kv_cache": "int8"},
        {**ENGINE, "stages.quantize.kv_cache": "int8"},
        "an INT8 KV cache",
    ),
    (
        "paged_attention_reads",
        {**ENGINE, "stages.quantize.kv_cache": "int8", f"{OWN}.chunked_context": True},
        {**ENGINE, "stages.quantize.kv_cache": "int8"},
        "chunked_context: an INT8 KV cache turns paged context FMHA off",
    ),
    (
        "paged_attention_reads",
        {**ENGINE, "stages.quantize.kv_cache": "int8", f"{OWN}.use_paged_context_fmha": True},
        {**ENGINE, "stages.quantize.kv_cache": "fp8", f"{OWN}.use_paged_context_fmha": True},
        "it cannot read an INT8 KV cache",
    ),
    (
        "paged_attention_reads",
        {**ENGINE, f"{OWN}.use_paged_context_fmha": False, f"{OWN}.chunked_context": True},
        {**ENGINE, f"{OWN}.chunked_context": True},
        "chunked_context: use_paged_context_fmha is off",
    ),
    (
        "fp8_attention_needs_cache",
        {**FP8, f"{OWN}.use_fp8_context_fmha": True},
        {**FP8, f"{OWN}.use_fp8_context_fmha": True, "stages.quantize.kv_cache": "fp8"},
        "needs an FP8 KV cache",
    ),
    (
        "prompts_fit",
        {**ENGINE, f"{OWN}.max_input_len": 3000, f"{OWN}.chunked_context": False},
        {**ENGINE, f"{OWN}.max_input_len": 3000},
        "3000 is more than max_num_tokens 2048, and prompts are not fed in chunks",
    ),
    ("prompts_fit", {**ENGINE, f"{OWN}.max_input_len": 4096}, ENGINE, "leaves no answer within max_seq_len 4096"),
    (
        "rows_of_engine",
        {**ENGINE, "stages.build.max_num_tokens": 70000},
        {**ENGINE, "stages.build.max_num_tokens": 65536},
        "more than max_batch_size x max_seq_len, 65536",
    ),
    (
        "rows_of_engine",
        {**ENGINE, "stages.build.max_num_tokens": 32},
        {**ENGINE, "stages.build.max_num_tokens": 32, "stages.build.block_size": 32},
        "fewer than a block's 64 tokens",
    ),
    (
        "rows_of_engine",
        {**ENGINE, f"{OWN}.max_beam_width": 200},
        {**ENGINE, f"{OWN}.max_beam_width": 128},
        "16 x 200 beams",
    ),
    ("plugins_agree", {**ENGINE, f"{OWN}.user_buffer": True}, FP8, "user_buffer needs reduce_fusion"),
    (
        "plugins_agree",
        {**ENGINE, f"{OWN}.reduce_fusion": True},
        {**ENGINE, f"{OWN}.reduce_fusion": True, "target.parallel": {"tensor": 2}},
        "reduce_fusion needs target.parallel.tensor above 1",
    ),
    (
        "plugins_agree",
        {**FP8, f"{OWN}.gemm_swiglu_plugin": "fp8", f"{OWN}.use_fused_mlp": False},
        {**FP8, f"{OWN}.gemm_swiglu_plugin": "fp8"},
        "gemm_swiglu_plugin needs FP8 weights and use_fused_mlp",
    ),
    (
        "plugins_agree",
        {**ENGINE, f"{OWN}.low_latency_gemm_plugin": "fp8", f"{OWN}.low_latency_gemm_swiglu_plugin": "fp8"},
        {**FP8, f"{OWN}.low_latency_gemm_plugin": "fp8", f"{OWN}.low_latency_gemm_swiglu_plugin": "fp8"},
        "low_latency_gemm_swiglu_plugin needs FP8 weights and use_fused_mlp; low_latency_gemm_plugin needs FP8",
    ),
    (
        "plugins_agree",
        {**ENGINE, f"{OWN}.use_fused_mlp": True},
        {**FP8, f"{OWN}.use_fused_mlp": True},
        "use_fused_mlp is for weights in 16 bits, FP8 or mixed precision",
    ),
    (
        "plugins_agree",
        {**ENGINE, "stages.quantize.method": "smoothquant", f"{OWN}.use_fused_mlp": True},
        {
            **ENGINE,
            "stages.quantize.recipe": {"rows": [{"pattern": "*.attention.dense", "method": "fp8"}]},
            f"{OWN}.use_fused_mlp": True,
        },
        "use_fused_mlp is for weights in 16 bits, FP8 or mixed precision",
    ),
    (
        "plugins_agree",
        {**ENGINE, f"{OWN}.multiple_profiles": True, f"{OWN}.opt_num_tokens": 64},
        {**ENGINE, f"{OWN}.opt_num_tokens": 64},
        "multiple_profiles leaves no choice of opt_num_tokens",
    ),
    ("plugins_agree", {**ENGINE, f"{OWN}.opt_num_tokens": 2049}, ENGINE, "2049 is more than max_num_tokens"),
    (
        "image_has_engines",
        {**ENGINE, f"{OWN}.image": "nvcr.io/nvidia/tritonserver:26.01-trtllm-python-py3"},
        {**ENGINE, f"{OWN}.image": "here:5000/triton:26.04-trtllm-python-py3@sha256:" + "0" * 64},
        "carries TensorRT-LLM 1.1.0, and an engine to be built is of 1.2.1",
    ),
]
# The same with models: rule, settings, model that breaks it, model or settings that keep it, a piece of the message
MODELS = [
    ("runs_architecture", ENGINE, V2_LITE, (ENGINE, CODER), "multi-head latent attention (DeepseekV2ForCausalLM)"),
    ("runs_architecture", ENGINE, V2_LITE, (PYTORCH, V2_LITE), "multi-head latent attention"),
    ("runs_experts", ENGINE, MOE, (FP8, MOE), "is int4: its MoE models take 16 bits and FP8"),
    (
        "runs_experts_apart",
        {**FP8, "target.parallel": {"tensor": 2, "expert": 2}},
        MOE,
        ({**FP8, "target.parallel": {"tensor": 2, "expert": 2}, "stages.quantize.method": "none"}, MOE),
        "expert parallel size 2",
    ),
]


@pytest.mark.parametrize(("rule", "broken", "kept", "message"), SETTINGS)
def test_settings(rule, broken, kept, message):
    assert message in RULES[rule].find(make_case(broken))
    assert RULES[rule].find(make_case(kept)) is None
    assert RULES[rule].way_out


@pytest.mark.parametrize(("rule", "settings", "model", "kept", "message"), MODELS)
def test_models(rule, settings, model, kept, message):
    assert message in RULES[rule].find(make_case(settings, model))
    assert RULES[rule].find(make_case(*kept)) is None


def test_every_rule_has_a_test():
    """Those of support.py have theirs beside it; here is that they are asked."""
    tested = {row[0] for row in (*SETTINGS, *MODELS)}
    limits = {limit.name for limit in LIMITS}
    assert tested - limits == RULES.keys() - limits
    assert limits - RULES.keys() == {"sizes_divide"}


def test_the_linears_that_are_asked_about():
    ask = make_case({**ENGINE, "stages.quantize.exclude": ("*.0.mlp.fc",)}, MOE).ask
    linears = {linear.name: linear for linear in ask.linears}
    assert linears["transformer.layers.0.mlp.fc"].format is None
    proj = linears["transformer.layers.3.mlp.experts.63.proj"]
    assert (proj.format, proj.group, proj.expert, proj.in_features, proj.out_features) == ("int4", 128, 63, 1408, 2048)
    assert ask.formats == {"int4"} and ask.sm == 90
    assert len([name for name in linears if ".experts." in name]) == 26 * 64 * 3
    assert len(make_case(ENGINE, V2_LITE).ask.linears) < 20  # refused whatever they are


def test_the_head_stays_in_16_bits():
    rows = {"stages.quantize.recipe": {"rows": [{"pattern": "lm_head", "method": "rtn"}]}}
    asked = make_case({**ENGINE, **rows}).ask
    assert asked.head == "int4" and "lm_head" not in {linear.name for linear in asked.linears}
    assert "exclude_modules" in RULES["head_in_16_bits"].find(make_case({**ENGINE, **rows}))
    assert "reads one of 16 bits" in RULES["loaded_in_pytorch"].find(make_case({**PYTORCH, **rows}))


def test_blocks_that_the_hubs_linears_would_cut_are_found():
    blocks = {"stages.quantize.method": "fp8_blocks", "stages.quantize.include": ("attention_input", "mlp")}
    find = RULES["loaded_in_pytorch"].find
    odd = {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 64}  # k and v are 64 rows each
    message = "transformer.layers.0.attention.qkv cannot be exported as hf: blocks of 128 rows reach over its parts"
    assert find(make_case({**PYTORCH, **blocks}, **odd)) == message
    assert find(make_case({**PYTORCH, **blocks})) is None
    blocks["stages.quantize.include"] = ("mlp",)
    assert find(make_case({**PYTORCH, **blocks}, **odd)) is None


def test_the_sources_own_blocks_are_found():
    kept = {**ENGINE, "stages.quantize.method": "none"}
    tensors = [("a.weight", "F8_E4M3")]
    assert "128 x 128 blocks" in RULES["no_fp8_blocks"].find(make_case(kept, tensors=tensors))
    assert RULES["no_fp8_blocks"].find(make_case(FP8, tensors=tensors)) is None


@pytest.mark.parametrize("format", LLMAPI_EXPORTS)
def test_what_is_loaded_is_exported(format):
    """The table's formats are those that the export writes."""
    encodings = {"modelopt": modelopt.ENCODINGS, "hf": hf.ENCODINGS}[LLMAPI_EXPORTS[format]]
    assert format in encodings


@pytest.mark.parametrize("backend", ["tensorrt_llm", "llmapi"])
def test_several_gpus_are_this_backends_business(backend):
    case = make_case({**FP8, "target.backend": backend, "target.parallel": {"tensor": 2, "pipeline": 2}})
    assert check_compatibility(case.config, case.architecture, {}) == ()


def test_a_head_may_be_on_several_ranks():
    case = make_case({**FP8, "target.parallel": {"tensor": 16}})  # of 8 key/value heads
    assert check_compatibility(case.config, case.architecture, {}) == ()
    case = make_case({**FP8, "target.parallel": {"tensor": 12}}, hidden_size=3072, num_attention_heads=24)
    with pytest.raises(CompatibilityError, match="8 key/value heads"):
        check_compatibility(case.config, case.architecture, {})


def test_the_cache_of_these_engines_is_what_was_asked():
    """The note that a cache stays wide is trtseek's own network's."""
    case = make_case({**FP8, "stages.quantize.kv_cache": "fp8"})
    assert check_compatibility(case.config, case.architecture, {}) == ()


def test_gpus():
    assert supported_sms("tensorrt_llm") == (80, 86, 89, 90, 100, 103, 120)
    assert supported_sms("llmapi") == (80, 86, 89, 90, 100, 103, 120, 121)
    case = make_case({**FP8, "target.gpu": "RTX-5090"})
    (note,) = check_compatibility(case.config, case.architecture, {})
    assert "names no GPU of SM120" in note


def test_experts_beyond_the_tensor_group_are_told_with_their_place():
    case = make_case({**ENGINE, "target.parallel": {"tensor": 2, "expert": 4}})
    with pytest.raises(CompatibilityError, match=r"^target\.parallel\.expert: expert parallel size 4 does not divide"):
        check_compatibility(case.config, case.architecture, {})
