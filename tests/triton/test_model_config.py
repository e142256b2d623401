import re

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipeline.config.schema import Package
from pipeline.errors import PackageError
from pipeline.triton import MODEL_REPO
from pipeline.triton.model_config import MODELS, load_base, parse_config, print_config
from pipeline.triton.repository import Paths, build_own_configs, describe_models
from tests.triton.emission import make_config

PATHS = Paths(engine="../../e", checkpoint="../../c", network="../../c/network.json", tokenizer="../../t")

# Counts and samples of TensorRT-LLM 1.2's templates: inputs, outputs (the ensemble's doubled output once).
COUNTS = {
    "preprocessing": (14, 20),
    "tensorrt_llm": (62, 21),
    "postprocessing": (2, 1),
    "ensemble": (36, 19),
    "tensorrt_llm_bls": (43, 20),  # and `messages`, ours
}
SAMPLES = [
    ("tensorrt_llm", "input", "input_ids", "TYPE_INT32", [-1], True, True, False),
    ("tensorrt_llm", "input", "input_lengths", "TYPE_INT32", [1], False, False, True),
    ("tensorrt_llm", "input", "request_output_len", "TYPE_INT32", [1], False, False, True),
    ("tensorrt_llm", "input", "stop_words_list", "TYPE_INT32", [2, -1], True, True, False),
    ("tensorrt_llm", "input", "seed", "TYPE_UINT64", [1], True, False, True),
    ("tensorrt_llm", "input", "min_tokens", "TYPE_INT32", [1], True, False, True),
    ("tensorrt_llm", "input", "return_num_output_tokens", "TYPE_BOOL", [1], True, False, True),
    ("tensorrt_llm", "input", "prompt_embedding_table", "TYPE_FP16", [-1, -1], True, True, False),
    ("tensorrt_llm", "input", "mrope_rotary_cos_sin", "TYPE_FP32", [-1], True, False, False),
    ("tensorrt_llm", "input", "skip_cross_attn_blocks", "TYPE_BOOL", [1], True, True, False),
    ("tensorrt_llm", "output", "output_ids", "TYPE_INT32", [-1, -1], False, False, False),
    ("tensorrt_llm", "output", "generation_logits", "TYPE_FP32", [-1, -1, -1], False, False, False),
    ("tensorrt_llm", "output", "num_output_tokens", "TYPE_INT32", [1], False, False, False),
    ("preprocessing", "input", "IMAGES", "TYPE_STRING", [-1], True, False, False),
    ("preprocessing", "output", "IMAGE_SIZES", "TYPE_INT64", [-1, 2], False, False, False),
    ("postprocessing", "output", "OUTPUT", "TYPE_STRING", [-1], False, False, False),
    ("ensemble", "input", "guided_decoding_guide", "TYPE_STRING", [1], True, True, False),
    ("ensemble", "input", "seed", "TYPE_UINT64", [1], True, False, False),
    ("tensorrt_llm_bls", "input", "return_log_probs", "TYPE_BOOL", [1], True, False, True),
    ("tensorrt_llm_bls", "input", "image_input", "TYPE_FP16", [-1, 3, -1, -1], True, False, False),
]


def build(**package):
    models = describe_models(make_config(**package), PATHS, network_digest="blake3:n", engine_digest="blake3:e")
    return build_own_configs(models)


@pytest.fixture
def configs():
    return build()


@pytest.mark.parametrize("model", MODELS)
def test_tensor_counts(model):
    config = load_base(model)
    assert (len(config.input), len(config.output)) == COUNTS[model]
    assert config.name == model


@pytest.mark.parametrize(("model", "kind", "name", "dtype", "dims", "optional", "ragged", "scalar"), SAMPLES)
def test_tensors(model, kind, name, dtype, dims, optional, ragged, scalar):
    (tensor,) = [tensor for tensor in getattr(load_base(model), kind) if tensor.name == name]
    assert model_config_pb2.DataType.Name(tensor.data_type) == dtype
    assert list(tensor.dims) == dims
    assert (getattr(tensor, "optional", False), getattr(tensor, "allow_ragged_batch", False)) == (optional, ragged)
    assert (tensor.HasField("reshape") and list(tensor.reshape.shape) == []) == scalar


def test_names_of_older_releases_are_gone():
    for model in MODELS:
        names = {tensor.name for tensor in load_base(model).input}
        assert not names & {"min_length", "random_seed"}


def test_print_and_parse_are_inverse(configs):
    for model, config in configs.items():
        text = print_config(config)
        assert text_format.Parse(text, ModelConfig()) == config
        assert not re.search(r"\$\{|\bNone\b", text), model


def test_a_printed_config_is_the_same_every_time(configs):
    again = build()
    assert {m: print_config(c) for m, c in configs.items()} == {m: print_config(c) for m, c in again.items()}


def test_parameters(configs):
    parameters = {key: value.string_value for key, value in configs["tensorrt_llm"].parameters.items()}
    assert parameters["gpt_model_path"] == "../../e"
    assert parameters["network_digest"] == "blake3:n"
    assert parameters["kv_cache_free_gpu_mem_fraction"] == "0.9"
    assert parameters["max_seq_len"] == "256"
    assert "max_tokens_in_paged_kv_cache" not in parameters  # unset means unbounded
    bls = {key: value.string_value for key, value in configs["tensorrt_llm_bls"].parameters.items()}
    assert (bls["accumulate_tokens"], bls["tokenizer_dir"]) == ("false", "../../t")


def test_settings_reach_the_models():
    configs = build(
        max_tokens_in_paged_kv_cache=4096,
        max_queue_size=7,
        add_special_tokens=False,
        preprocessing_instances=3,
    )
    assert configs["tensorrt_llm"].parameters["max_tokens_in_paged_kv_cache"].string_value == "4096"
    assert configs["preprocessing"].parameters["add_special_tokens"].string_value == "false"
    assert configs["preprocessing"].instance_group[0].count == 3
    assert configs["tensorrt_llm"].dynamic_batching.default_queue_policy.max_queue_size == 7
    assert {c.max_batch_size for c in configs.values()} == {8}


OTHER = {
    "kv_cache_free_gpu_mem_fraction": 0.5,
    "max_tokens_in_paged_kv_cache": 512,
    "batch_scheduler_policy": "max_utilization",
    "enable_kv_cache_reuse": False,
    "max_queue_size": 3,
    "runner": "engine",
    "interpreter_mode": "exact",
    "add_special_tokens": False,
    "skip_special_tokens": False,
    "preprocessing_instances": 2,
    "postprocessing_instances": 2,
}


def test_every_setting_is_told_to_a_model(configs):
    """A setting that no model's config changes with would be silently ignored."""
    assert OTHER.keys() == Package.model_fields.keys() - {"flavour", "check", "tensorrt_llm"}
    before = {model: print_config(config) for model, config in configs.items()}
    for name, value in OTHER.items():
        after = build(**{name: value})
        assert {model: print_config(config) for model, config in after.items()} != before, name


def test_streaming_models_are_decoupled(configs):
    decoupled = {model for model, config in configs.items() if config.model_transaction_policy.decoupled}
    assert decoupled == {"tensorrt_llm", "tensorrt_llm_bls", "ensemble"}


def test_the_ensemble_is_the_text_path_with_an_ensembles_tensors(configs):
    ensemble, bls, base = configs["ensemble"], configs["tensorrt_llm_bls"], load_base("ensemble")
    assert (ensemble.name, ensemble.backend, ensemble.platform) == ("ensemble", "python", "")
    assert not ensemble.HasField("ensemble_scheduling")
    assert list(ensemble.input) == list(base.input)
    assert list(ensemble.output)[:-1] == list(base.output)
    assert ensemble.output[-1] in bls.output and ensemble.output[-1].name == "output_ids"
    assert ensemble.parameters == bls.parameters
    assert list(ensemble.instance_group) == list(bls.instance_group)


def test_fields_that_triton_2_51_does_not_know_are_not_used(configs):
    for config in configs.values():
        assert not {field.name for field, _ in config.ListFields()} & {"model_metrics"}
        assert not config.ensemble_scheduling.DESCRIPTOR.fields_by_name.get("max_inflight_requests") or (
            "max_inflight_requests" not in print_config(config)
        )


def test_a_broken_text_is_placed():
    with pytest.raises(PackageError, match=r"x\.pbtxt: 2:1 : "):
        parse_config('name: "a"\nmax_batch_sise: 3\n', "x.pbtxt")


def test_sources_are_complete():
    for model in MODELS:
        assert (MODEL_REPO / model / "config.pbtxt").is_file()
