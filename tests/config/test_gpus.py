import pytest

from pipeline.config.gpus import find_gpu, load_gpus, supported_sms
from pipeline.errors import ConfigError

# NVIDIA's list of CUDA compute capabilities (developer.nvidia.com/cuda-gpus).
COMPUTE_CAPABILITY = {
    "T4": 75,
    "A100-40GB": 80,
    "A100-80GB": 80,
    "A800": 80,
    "A30": 80,
    "A10": 86,
    "A40": 86,
    "RTX-3090": 86,
    "L4": 89,
    "L40S": 89,
    "RTX-4090": 89,
    "RTX-6000-Ada": 89,
    "H100": 90,
    "H200": 90,
    "H20": 90,
    "B200": 100,
    "RTX-5090": 120,
    "RTX-PRO-6000": 120,
}


@pytest.mark.parametrize(("name", "sm"), COMPUTE_CAPABILITY.items())
def test_compute_capabilities(name, sm):
    assert find_gpu(name).sm == sm


def test_features_begin_with_their_generation():
    for gpu in load_gpus().values():
        assert gpu.has("bf16") == (gpu.sm >= 80), gpu.name
        assert gpu.has("fp8") == (gpu.sm >= 89), gpu.name
        assert gpu.has("fp4") == (gpu.sm >= 100), gpu.name
        assert 10 < gpu.memory_gib < 300, gpu.name
        assert 200 < gpu.bandwidth_gb_s < 10_000, gpu.name


def test_backends():
    assert supported_sms("tensorrt_rtx") == (75, 80, 86, 89, 120, 121)
    assert find_gpu("H200").backends == ("tensorrt", "tensorrt_llm", "llmapi")
    assert find_gpu("RTX 5090").backends == ("tensorrt_rtx", "tensorrt", "tensorrt_llm", "llmapi")


def test_rtx_builder_agrees_with_the_table():
    """The builder itself says which targets it takes; this needs no GPU."""
    trt = pytest.importorskip("tensorrt_rtx")
    accepted = set()
    config = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR)).create_builder_config()
    config.num_compute_capabilities = 1
    for name in dir(trt.ComputeCapability):
        if name.startswith("SM") and config.set_compute_capability(getattr(trt.ComputeCapability, name), 0):
            accepted.add(int(name.removeprefix("SM")))
    assert accepted == set(supported_sms("tensorrt_rtx"))


def test_the_a100_note_is_kept():
    assert "support matrix does not list the A100" in find_gpu("A100").notes["tensorrt_rtx"]
    assert not find_gpu("L4").notes


@pytest.mark.parametrize("name", ["rtx 4090", "RTX4090", "NVIDIA GeForce RTX 4090", "4090", "rtx_4090"])
def test_spelling_does_not_matter(name):
    assert find_gpu(name).name == "RTX-4090"


def test_names_are_unambiguous():
    spellings = [name for gpu in load_gpus().values() for name in (gpu.name, *gpu.aliases)]
    assert len({s.lower().replace("-", "") for s in spellings}) == len(spellings)


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(ConfigError) as caught:
        find_gpu("RTX-4091")
    assert caught.value.hint.startswith("nearest names: RTX-4090")
    assert "`trtseek schema` lists all" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        find_gpu("???")
    assert caught.value.hint == f"known names: {', '.join(load_gpus())}"
