import re
from collections import Counter
from pathlib import Path

import pytest

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.config.case import Case
from pipeline.config.compatibility import check_compatibility
from pipeline.config.load import load_config
from pipeline.config.notes import NOTES
from pipeline.config.recipe_rules import RECIPE_RULES
from pipeline.config.rules import RULES
from pipeline.config.schema import Config
from pipeline.errors import CompatibilityError
from pipeline.quantization.rules import choose_linears

CONFIGS = Path(__file__).parents[2] / "configs"

# Sizes of DeepSeek-Coder-6.7B and DeepSeek-V2-Lite, as their hub configs state them.
CODER = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 32256,
    "max_position_embeddings": 16384,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
    "torch_dtype": "bfloat16",
}
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 27,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rope_scaling": {"factor": 40, "type": "yarn", "original_max_position_embeddings": 4096},
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "torch_dtype": "bfloat16",
}


def make_case(settings=None, model=CODER, tensors=(), **changes):
    """A case of A100-80GB and the given settings, "a.b" -> value."""
    values = {"name": "case", "model": {"path": Path("m")}, "target": {"gpu": "A100-80GB"}}
    for key, value in (settings or {}).items():
        *above, last = key.split(".")
        section = values
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    return Case(
        config=Config.model_validate(values, strict=False),
        architecture=parse_architecture({**model, **changes}),
        tensors={name: TensorInfo(name, dtype, (2, 2)) for name, dtype in tensors},
    )


def find(name, case):
    rules = {rule.name: rule for rule in (*RULES, *RECIPE_RULES, *NOTES)}
    return rules[name].find(case)


# rule, broken settings, settings that keep it, a piece of the message
AUTO = {"stages.quantize.recipe": {"auto": True}, "stages.quantize.budget": {"kl": 0.02}}
LOWERING = "stages.build.lowering"
ROW = {"pattern": "*.attention.dense", "method": "int8"}
SETTINGS = [
    ("recipe_comes_later", AUTO, {}, "as if every linear became awq in groups of 128"),
    (
        "recipe_matches",
        {"stages.quantize.recipe": {"rows": [ROW, {**ROW, "pattern": "*.mpl.fc"}]}},
        {"stages.quantize.recipe": {"rows": [ROW]}},
        "*.mpl.fc matches no linear",
    ),
    (
        "recipe_quantizes",
        {"stages.quantize.recipe": {"rows": [{"pattern": "*", "method": "none"}]}},
        {"stages.quantize.recipe": {"rows": [{"pattern": "*.mlp.fc", "method": "none"}]}},
        "no linear is left to quantize: those that include names stay in 16 bits by its rows",
    ),
    ("idle_budget", {"stages.quantize.budget": {"kl": 0.02}}, AUTO, "stages.quantize.budget is for `trtseek recipe`"),
    (
        "idle_rows",
        {"stages.quantize.recipe": {"rows": [{**ROW, "pattern": "*"}, ROW]}},
        {"stages.quantize.recipe": {"rows": [ROW, {**ROW, "pattern": "*"}]}},
        "*.attention.dense decides nothing",
    ),
    (
        "head_is_fit",
        {"stages.quantize.recipe": {"rows": [{"pattern": "lm_head", "method": "awq"}]}},
        {"stages.quantize.recipe": {"rows": [{"pattern": "lm_head", "method": "int8"}]}},
        "what it reads is not measured",
    ),
    (
        "head_is_fit",
        {"stages.quantize.include": ["mlp", "head"], "stages.quantize.method": "fp8_blocks", "target.gpu": "L40S"},
        {"stages.quantize.include": ["mlp", "head"], "stages.quantize.method": "int8"},
        "each step would dequantize it whole",
    ),
    ("auto_has_budget", {"stages.quantize.recipe": {"auto": True}}, AUTO, "nothing to solve for"),
    (
        "budget_is_possible",
        AUTO | {"stages.quantize.budget": {"size_ratio": 0.25}},
        AUTO | {"stages.quantize.budget": {"size_ratio": 0.5}},
        "size_ratio: 0.25 cannot be met: the smallest formats make 0.2",
    ),
    (
        "budget_is_possible",
        AUTO | {"stages.quantize.budget": {"bits_per_weight": 4.1}},
        AUTO | {"stages.quantize.budget": {"bits_per_weight": 6}},
        "bits_per_weight: 4.1 cannot be met: the smallest formats make 4.",
    ),
    ("auto_has_method", {**AUTO, "stages.quantize.method": "none"}, AUTO, "which is none"),
    ("auto_or_rows", {**AUTO, "stages.quantize.recipe": {"auto": True, "rows": [ROW]}}, AUTO, "there are rows"),
    (
        "choices_fit_gpu",
        {**AUTO, "stages.quantize.sensitivity": {"formats": ["int4", "fp8_blocks"]}},
        {**AUTO, "stages.quantize.sensitivity": {"formats": ["int4", "fp8_blocks"]}, "target.gpu": "L4"},
        "fp8_blocks needs FP8 tensor cores",
    ),
    ("sm_of_backend", {"target.gpu": "H100"}, {"target.gpu": "L4"}, "SM90"),
    ("sm_of_backend", {"target.gpu": "B200"}, {"target.gpu": "B200", "target.backend": "tensorrt"}, "SM100"),
    ("fp8_needs_sm89", {"stages.quantize.method": "fp8"}, {"stages.quantize.method": "awq"}, "A100-80GB is SM80"),
    (
        "fp8_needs_sm89",
        {"stages.quantize.method": "fp8", "target.gpu": "A10"},
        {"stages.quantize.method": "fp8", "target.gpu": "L4"},
        "method fp8 needs FP8 tensor cores, SM89 or later",
    ),
    (
        "fp8_needs_sm89",
        {"stages.quantize.method": "fp8_blocks"},
        {"stages.quantize.method": "smoothquant"},
        "method fp8_blocks needs FP8",
    ),
    (
        "w4a8_is_tensorrt_llms",
        {"stages.quantize.method": "awq_fp8", "target.gpu": "L4"},
        {"stages.quantize.method": "awq_fp8", "target.gpu": "L4", "target.backend": "tensorrt_llm"},
        "method awq_fp8 is what TensorRT-LLM's W4A8 kernels compute; tensorrt_rtx has none",
    ),
    ("bf16_needs_sm80", {"target.gpu": "T4"}, {"target.gpu": "A10"}, "T4 is SM75"),
    (
        "bf16_needs_sm80",
        {"target.gpu": "T4", "stages.convert.dtype": "bfloat16"},
        {"target.gpu": "T4", "stages.convert.dtype": "float16"},
        "bfloat16",
    ),
    (
        "turing_has_less",
        {"target.gpu": "T4", "stages.convert.dtype": "float16"},
        {"target.gpu": "T4", "stages.convert.dtype": "float16", "stages.quantize.method": "none"},
        "INT4 weights for SM80 and later; the T4 is SM75",
    ),
    (
        "turing_has_less",
        {"target.gpu": "T4", "stages.convert.dtype": "float32", "stages.quantize.method": "none"},
        {"target.gpu": "T4", "target.backend": "tensorrt"},
        "float32 weights",
    ),
    (
        "exclude_matches",
        {"stages.quantize.exclude": ("transformer.layers.99.*",)},
        {"stages.quantize.exclude": ("transformer.layers.0.*", "*.mlp.fc.weight")},
        "transformer.layers.99.* matches no linear",
    ),
    (
        "something_to_quantize",
        {"stages.quantize.include": ("experts",)},
        {"stages.quantize.include": ("experts",), "stages.quantize.method": "none"},
        "the model has attention_input, attention_output, head, mlp",
    ),
    ("context_of_model", {"stages.build.max_seq_len": 16385}, {"stages.build.max_seq_len": 16384}, "context of 16384"),
    (
        "calibration_within_context",
        {"stages.quantize.calibration.length": 20000},
        {"stages.quantize.calibration.length": 20000, "stages.quantize.method": "rtn"},
        "calibration.length 20000",
    ),
    ("heldout_within_context", {"stages.verify.heldout.window": 16385}, {}, "heldout.window 16385"),
    ("drift_within_context", {"stages.verify.context.lengths": (256, 16385)}, {}, "context.lengths 16385"),
    (
        "limits_agree",
        {"stages.build.generation": ({"batch": 17, "length": 64}, {"batch": 1, "length": 4096})},
        {"stages.build.generation": ({"batch": 16, "length": 4096},)},
        "generation profile 17 x 64 is outside max_batch_size 16",
    ),
    ("limits_agree", {"stages.build.generation": ({"batch": 1, "length": 4097},)}, {}, "1 x 4097 is outside"),
    (
        "rows_hold_batch",
        {"stages.build.max_num_tokens": 15},
        {"stages.build.max_num_tokens": 16},
        "15 rows",
    ),
    ("limits_agree", {"stages.build.max_blocks": 64}, {"stages.build.max_blocks": 65}, "needs 65 blocks"),
    (
        "limits_agree",
        {"stages.build.generation": ({"batch": 2, "length": 1024},)},
        {"stages.build.generation": ({"batch": 2, "length": 1024}, {"batch": 1, "length": 4096})},
        "no generation profile reaches max_seq_len 4096",
    ),
    (
        "plugins_are_new",
        {"stages.build.lowering": {"paged_attention": "plugin"}},
        {},
        "paged_attention: engine.json says whether these plugins' kernels have passed on an SM80",
    ),
    (
        "nothing_to_exchange",
        {"stages.build.lowering": {"moe_all_to_all": "plugin"}},
        {"stages.build.lowering": {"moe_all_to_all": "plugin"}, "target.parallel": {"tensor": 2, "expert": 2}},
        "every GPU has all experts",
    ),
    (
        "exchange_has_a_price",
        {"stages.build.lowering": {"moe_all_to_all": "plugin"}, "target.parallel": {"tensor": 2, "expert": 2}},
        {"target.parallel": {"tensor": 2, "expert": 2}},
        "not captured in CUDA graphs",
    ),
    (
        "payload_of_plugin",
        {"stages.build.expert_payload": "fp8"},
        {"stages.build.expert_payload": "fp8", "stages.build.lowering": {"moe_all_to_all": "plugin"}},
        "by the plugin moe_all_to_all only",
    ),
    ("weights_come_later", {"stages.build.weights": "stripped"}, {}, "`trtseek refit` brings them"),
    ("an_engine_each", {"target.parallel": {"tensor": 2}}, {}, "an engine for each of 2 GPUs"),
    (
        "made_blocks_save_memory",
        {"stages.quantize.method": "fp8_blocks"},
        {"stages.quantize.method": "fp8"},
        "save memory, not time",
    ),
    (
        "cache_goes_with_weights",
        {"stages.quantize.kv_cache": "fp8", "stages.quantize.method": "none"},
        {"stages.quantize.kv_cache": "fp8", "stages.quantize.method": "rtn"},
        "kv_cache: fp8 with method: none",
    ),
    (
        "cache_is_the_plugins",
        {"stages.quantize.kv_cache": "int8", f"{LOWERING}.rope_paged_kv": "plugin"},
        {
            "stages.quantize.kv_cache": "int8",
            f"{LOWERING}.rope_paged_kv": "plugin",
            f"{LOWERING}.paged_attention": "plugin",
        },
        "a KV cache in int8 is written and read by the plugins rope_paged_kv and paged_attention, and paged_attention "
        "would be native",
    ),
    (
        "fp8_cache_needs_sm89",
        {"stages.quantize.kv_cache": "fp8"},
        {"stages.quantize.kv_cache": "fp8", "target.gpu": "L4"},
        "an FP8 KV cache needs SM89 or later; the A100-80GB is SM80",
    ),
    (
        "cache_scales_unread",
        {"target.gpu": "H100", "target.backend": "llmapi", "stages.quantize.kv_cache": "fp8"},
        {"target.gpu": "H100", "target.backend": "tensorrt_llm", "stages.quantize.kv_cache": "fp8"},
        "the checkpoint has the calibrated scales of the cache in fp8",
    ),
]


@pytest.mark.parametrize(("rule", "broken", "kept", "message"), SETTINGS)
def test_settings(rule, broken, kept, message):
    assert message in find(rule, make_case(broken))
    assert find(rule, make_case(kept)) is None


# rule, settings, keys of config.json that break it, keys that keep it, a piece of the message
MODELS = [
    (
        "turing_has_less",
        {"target.gpu": "T4", "stages.convert.dtype": "float16", "stages.quantize.method": "none"},
        {},
        {"n_routed_experts": None},
        "routed experts, whose router runs in float32",
    ),
    (
        "experts_share_a_format",
        {"stages.quantize.exclude": ("*.layers.3.mlp.experts.5.*",)},
        {},
        {"n_routed_experts": None},
        "transformer.layers.3.mlp.experts.5.fc would be in another format",
    ),
    (
        "gather_is_for_generation",
        {"stages.build.moe": "gather"},
        {},
        {"n_routed_experts": None},
        "gather copies 6 experts' weights for every row, and a context step has up to 2048 rows",
    ),
    (
        "experts_have_kernels",
        {"stages.quantize.method": "int8", "stages.build.lowering": {"moe_experts": "plugin"}},
        {},
        {"n_routed_experts": None},
        "the plugin moe_experts has no kernel for int8",
    ),
    (
        "choices_have_kernels",
        {**AUTO, "stages.build.lowering": {"moe_experts": "plugin"}},
        {},
        {"n_routed_experts": None},
        "auto may choose int8, which the plugin moe_experts has no kernel for",
    ),
    (
        "experts_have_kernels",
        {"stages.quantize.exclude": ("*.experts.*.gate",), "stages.build.lowering": {"moe_experts": "plugin"}},
        {},
        {"n_routed_experts": None},
        "reads fc and gate as one: transformer.layers.1.mlp.experts.0.fc and 0.gate are in int4 in groups of 128",
    ),
    (
        "no_experts",
        {"stages.build.lowering": {"moe_experts": "plugin"}},
        {"n_routed_experts": None},
        {},
        "moe_experts has nothing to do: DeepseekV2ForCausalLM has no routed experts",
    ),
    (
        "group_divides_something",
        {"stages.quantize.include": ("mlp",)},
        {"hidden_size": 2000, "intermediate_size": 1000},
        {},
        "1000, 2000",
    ),
]


@pytest.mark.parametrize(("rule", "settings", "broken", "kept", "message"), MODELS)
def test_models(rule, settings, broken, kept, message):
    assert message in find(rule, make_case(settings, V2_LITE, **broken))
    assert find(rule, make_case(settings, V2_LITE, **kept)) is None


def test_no_plugin_is_spoken_of_that_the_model_has_no_place_for():
    every = {LOWERING: dict.fromkeys(("paged_attention", "moe_experts", "moe_all_to_all"), "plugin")}
    assert find("plugins_are_new", make_case(every)).startswith("paged_attention: engine.json")
    assert find("plugins_are_new", make_case(every, V2_LITE)).startswith("paged_attention, moe_experts, moe_all")


def test_every_rule_has_a_test():
    tested = {row[0] for row in (*SETTINGS, *MODELS)}
    tested |= {"backend_of_gpu", "smaller_groups", "fp8_saves_memory", "fp8_source_needs_sm89"}
    assert tested == {rule.name for rule in (*RULES, *RECIPE_RULES, *NOTES)}


def test_every_rule_points_at_a_setting():
    for rule in (*RULES, *RECIPE_RULES, *NOTES):
        section = Config
        if isinstance(rule.key, str):  # the others find it: test_a_recipe_s_row_is_named_for_its_method
            for part in rule.key.split("."):
                section = section.model_fields[part].annotation if isinstance(section, type) else None
        assert rule.way_out or rule in NOTES


def test_a_gathered_engine_that_only_generates_is_fine():
    settings = {"stages.build.moe": "gather", "stages.build.max_num_tokens": 16}
    assert find("gather_is_for_generation", make_case(settings, V2_LITE)) is None


def test_an_fp8_checkpoint_is_named_where_its_fp8_reaches_the_engine():
    tensors = [("a.weight", "BF16"), ("b.weight", "F8_E4M3")]
    kept = {"stages.quantize.method": "none"}
    problem = find("fp8_source_needs_sm89", make_case(kept, tensors=tensors))
    assert "the FP8 tensor b.weight needs FP8 tensor cores" in problem
    for way_out in (
        {**kept, "target.gpu": "L4"},
        {**kept, "stages.convert.dtype": "bfloat16"},
        {"stages.quantize.method": "awq"},
        {"stages.quantize.method": "rtn"},
    ):
        case = make_case(way_out, tensors=tensors)
        assert find("fp8_source_needs_sm89", case) is None
        note = find("fp8_saves_memory", case)
        assert ("save memory, not time" in note) if way_out.get("target.gpu") == "L4" else note is None


# What the hub's configs state, and the context that their authors give.
@pytest.mark.parametrize(
    ("model", "rope", "positions", "limit"),
    [
        (CODER, {"factor": 4.0, "type": "linear"}, 16384, 16384),  # DeepSeek-Coder: trained to 16K
        (V2_LITE, V2_LITE["rope_scaling"], 163840, 163840),  # DeepSeek-V2: 4096 x 40
        (CODER, None, 4096, 4096),
        (  # Llama 3.1: 128K, which is not factor x original
            CODER,
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            131072,
            131072,
        ),
        (  # Qwen2.5 with YaRN switched on: states 32K, reaches 128K
            CODER,
            {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
            32768,
            131072,
        ),
        (CODER, {"factor": 2.0, "type": "dynamic"}, 4096, 4096),
    ],
)
def test_context_limits(model, rope, positions, limit):
    case = make_case({"stages.build.max_seq_len": limit}, model, rope_scaling=rope, max_position_embeddings=positions)
    assert case.context_limit == limit
    assert find("context_of_model", case) is None
    longer = make_case(
        {"stages.build.max_seq_len": limit + 1}, model, rope_scaling=rope, max_position_embeddings=positions
    )
    message = find("context_of_model", longer)
    assert str(limit) in message
    assert ("dynamic RoPE changes its base" in message) == (case.architecture.rope.kind == "dynamic")


def test_a_tied_head_is_the_embedding():
    """One rule says so, not also that no linear is named so."""
    rows = {"stages.quantize.recipe": {"rows": [{"pattern": "lm_head", "method": "int8"}]}}
    case = make_case(rows, tie_word_embeddings=True)
    assert "lm_head is the embedding of this model" in find("head_is_fit", case)
    assert find("recipe_matches", case) is None


def test_smaller_groups_are_reported_per_linear():
    """DeepSeek-V2-Lite's dense layer: 10944 = 171 x 64."""
    note = find("smaller_groups", make_case(model=V2_LITE))
    assert note == ("group size 128 does not divide every input: transformer.layers.*.mlp.proj (1x): groups of 64")
    assert find("smaller_groups", make_case()) is None


@pytest.mark.parametrize(
    ("method", "otherwise"), [("fp8", "c.yaml:2: target.gpu"), ("awq_fp8", "stages.quantize.method")]
)
def test_a_recipe_s_row_is_named_for_its_method(tmp_path, method, otherwise):
    (tmp_path / "r.yaml").write_text(f"rows:\n  - {ROW}\n  - {{pattern: '*',\n     method: {method}}}\n")
    (tmp_path / "c.yaml").write_text("model: {path: m}\ntarget: {gpu: A100-80GB}\n")
    for setting, place in (
        (f"recipe={tmp_path}/r.yaml", "r.yaml:4: stages.quantize.recipe.rows.1.method: method"),
        (f"method={method}", f"{otherwise}: method"),
    ):
        config = load_config(tmp_path / "c.yaml", [f"stages.quantize.{setting}"])
        with pytest.raises(CompatibilityError) as caught:
            check_compatibility(config, parse_architecture(CODER), {})
        assert f"{place} {method} " in caught.value.message
        assert "convert.dtype" not in caught.value.hint  # of a checkpoint that holds FP8


def test_groups_that_a_recipe_asks_for_are_no_news():
    rows = [{"pattern": "*.mlp.fc", "method": "rtn", "group_size": 32}]
    assert find("smaller_groups", make_case({"stages.quantize.recipe": {"rows": rows}})) is None
    note = find("smaller_groups", make_case({"stages.quantize.recipe": {"rows": rows}}, model=V2_LITE))
    assert note == "group size 128 does not divide every input: transformer.layers.*.mlp.proj (1x): groups of 64"


def test_a_linear_that_no_group_divides_stays_16_bit():
    note = find("smaller_groups", make_case(intermediate_size=1000))
    assert note.endswith("transformer.layers.*.mlp.proj (32x): stays 16-bit")


def test_the_a100_note_is_shown():
    assert "does not list the A100" in find("backend_of_gpu", make_case())
    assert find("backend_of_gpu", make_case({"target.gpu": "L4"})) is None


@pytest.mark.parametrize("fixture", ["llama_path", "deepseek_v2_path", "deepseek_v2_lite_path"])
def test_the_choice_of_linears_is_the_quantizer_s(request, fixture):
    source = CheckpointFolder.open(request.getfixturevalue(fixture))
    settings = {"stages.quantize.group_size": 64, "stages.quantize.exclude": ("transformer.layers.0.*", "*.fc.weight")}
    case = make_case(settings)
    case = Case(config=case.config, architecture=source.architecture, tensors=source.tensors)
    mappings = layout_for(source.architecture).mappings()
    selection = choose_linears(
        mappings,
        {m.target: TensorInfo(m.target, "F16", m.target_shape) for m in mappings},
        case.quantize.rules,
    )
    ours: Counter[tuple[str, int]] = Counter()
    for linear in case.chosen:
        if group := linear.group:
            assert selection.linears[linear.name].shape == (linear.out_features, linear.in_features)
            ours[re.sub(r"\d+", "*", linear.name), group] += linear.count
    assert ours == Counter((re.sub(r"\d+", "*", name), linear.group) for name, linear in selection.linears.items())
    assert ours


def test_all_reasons_come_at_once_with_file_and_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(
        "model: {path: m}\ntarget: {gpu: H200}\nstages:\n  build:\n    max_seq_len: 99999\n    max_num_tokens: 4\n"
    )
    case = make_case()
    with pytest.raises(CompatibilityError) as caught:
        check_compatibility(load_config("a.yaml"), case.architecture, {})
    assert [line.rpartition(": ")[0] for line in caught.value.message.splitlines()] == [
        "a.yaml:2: target.gpu",
        "a.yaml:5: stages.build.max_seq_len",
        "a.yaml:6: stages.build.max_num_tokens",
    ]
    assert "backend: tensorrt" in caught.value.hint


def test_a_limit_that_contradicts_a_profile_is_named_with_its_own_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profiles = "[{batch: 64, length: 1024}, {batch: 16, length: 4096}]"
    base = f"model: {{path: m}}\ntarget: {{gpu: L4}}\nstages:\n  build:\n    generation: {profiles}\n"
    (tmp_path / "base.yaml").write_text(base + "    max_batch_size: 64\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nstages:\n  build:\n    max_batch_size: 8\n")
    with pytest.raises(CompatibilityError) as caught:
        check_compatibility(load_config("mine.yaml"), make_case().architecture, {})
    assert "generation profile 64 x 1024 is outside max_batch_size 8" in caught.value.message
    assert "mine.yaml:4: stages.build.max_batch_size" in caught.value.message
    assert "base.yaml:5: stages.build.generation" in caught.value.message


@pytest.mark.parametrize(("batch", "length"), [(1, 256), (8, 1024), (16, 2048), (32, 16384)])
def test_limits_laid_over_the_base_bring_their_own_profile(tmp_path, batch, length):
    (tmp_path / "mine.yaml").write_text(
        f"extends: {CONFIGS / 'base.yaml'}\nmodel: {{path: m}}\ntarget: {{gpu: L4}}\n"
        f"stages: {{build: {{max_seq_len: {length}, max_batch_size: {batch}}}}}\n"
    )
    config = load_config(tmp_path / "mine.yaml")
    check_compatibility(config, make_case().architecture, {})
    assert [(p.batch, p.length) for p in config.stages.build.profiles] == [(batch, length)]


def test_fitting_cases_pass():
    for model in (CODER, V2_LITE):
        case = make_case(model=model)
        assert isinstance(check_compatibility(case.config, case.architecture, case.tensors), tuple)


def test_linears_are_not_listed_where_nothing_asks(monkeypatch):
    """DeepSeek-V3 has 44,544 expert matrices: `validate` must not list them for a config that quantizes nothing."""
    monkeypatch.setattr("pipeline.checkpoint.layouts.list_kinds", lambda _: pytest.fail("listed"))
    case = make_case({"stages.quantize.method": "none"})
    check_compatibility(case.config, case.architecture, {})


@pytest.mark.parametrize(
    "name",
    [
        *("a100-int4", "a100-int4-plugins", "a100-int4-coder", "rtx-int4", "rtx5090-int4", "a10-int4"),
        *("l40s-fp8", "l40s-fp8-kv8"),
    ],
)
def test_the_examples_fit_their_models(name, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    config = load_config(name)
    source = CheckpointFolder.open(config.model.path)
    assert isinstance(check_compatibility(config, source.architecture, source.tensors), tuple)
