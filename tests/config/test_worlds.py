"""What each other backend would change of a config."""

from dataclasses import replace

import pytest

from pipeline.config.backends import BACKENDS
from pipeline.config.lowerings import choose_lowerings
from pipeline.config.worlds import list_other_worlds
from tests.config.test_compatibility import CODER, V2_LITE, make_case
from tests.passes import fill_table

OWN = "stages.build.tensorrt_llm"


def look(settings, model=CODER):
    case = make_case(settings, model)
    worlds = list_other_worlds(replace(case, config=choose_lowerings(case.config)))
    return {world.backend: world for world in worlds}


@pytest.mark.parametrize(
    ("gpu", "backend", "others"),
    [
        ("L4", "tensorrt_rtx", {"tensorrt", "tensorrt_llm", "llmapi"}),
        ("H100", "tensorrt_llm", {"tensorrt", "llmapi"}),  # TensorRT-RTX builds nothing for it
        ("L4", "llmapi", {"tensorrt_rtx", "tensorrt", "tensorrt_llm"}),
    ],
)
def test_every_other_backend_is_looked_at(gpu, backend, others):
    assert look({"target.gpu": gpu, "target.backend": backend}).keys() == others


def test_what_would_be_lost_and_gained():
    own = look({"target.gpu": "L4", "stages.build.max_blocks": 2000, "stages.build.weights": "stripped"})
    assert own["tensorrt"].loses == own["tensorrt"].gains == () == own["tensorrt"].reasons
    assert own["llmapi"].loses == ("stages.build.max_blocks", "stages.build.weights")
    assert own["llmapi"].reasons == ()
    assert "no engine to be built" in own["llmapi"].gains

    settings = {
        "target.gpu": "H100",
        "target.backend": "tensorrt_llm",
        "stages.quantize.method": "fp8",
        "stages.quantize.kv_cache": "fp8",
        f"{OWN}.multiple_profiles": True,
        "stages.package.tensorrt_llm": {"cuda_graph_mode": True},
    }
    foreign = look(settings)
    lost = (f"{OWN}.multiple_profiles", "stages.package.tensorrt_llm.cuda_graph_mode")
    assert foreign["llmapi"].loses == lost and foreign["llmapi"].reasons == ()
    assert foreign["tensorrt"].loses == lost
    assert foreign["tensorrt"].reasons[0].endswith("and rope_paged_kv and paged_attention would be native")
    assert set(foreign["tensorrt"].gains) == set(BACKENDS["tensorrt"].gives)


def test_reasons_are_the_rules_own():
    worlds = look({"target.gpu": "L4"}, V2_LITE)
    assert any("multi-head latent attention" in reason for reason in worlds["tensorrt_llm"].reasons)
    assert worlds["llmapi"].reasons == ()
    (reason,) = look({"target.gpu": "L4", "stages.quantize.method": "int8"})["llmapi"].reasons
    assert reason.startswith("int8 is not exported to what the PyTorch backend reads")
    worlds = look({"target.gpu": "B200", "target.backend": "tensorrt"})
    assert any("INT8 and INT4 are what" in reason for reason in worlds["tensorrt_llm"].reasons)


def test_a_contradicting_flavour_goes_with_its_backend():
    settings = {"target.gpu": "L4", "stages.package.flavour": "trtseek"}
    assert look(settings)["llmapi"].reasons == ()


CACHED = {
    "target.gpu": "H100",
    "stages.quantize.method": "fp8",
    "stages.quantize.kv_cache": "fp8",
}


def test_where_kernels_have_passed_another_world_has_plugins_too(monkeypatch, tmp_path):
    fill_table(tmp_path / "passed.json", monkeypatch, sm=90)
    assert look({**CACHED, "target.backend": "tensorrt_llm"})["tensorrt"].reasons == ()
    refused = {**CACHED, "target.backend": "llmapi", "stages.build.lowering": {"paged_attention": "native"}}
    assert look(refused)["tensorrt"].reasons[0].endswith("and paged_attention would be native")


def test_only_lowerings_that_a_config_sets_are_lost(monkeypatch, tmp_path):
    fill_table(tmp_path / "passed.json", monkeypatch, sm=90)
    own = {**CACHED, "target.backend": "tensorrt"}
    for world in look(own).values():
        assert world.loses == world.reasons == ()
    (foreign,) = {world.loses for world in look({**own, "stages.build.lowering": {"moe_experts": "plugin"}}).values()}
    assert foreign == ("stages.build.lowering",)
