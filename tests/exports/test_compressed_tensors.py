"""compressed-tensors folders, read by transformers and by the library itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_name

from pipeline.errors import CheckpointError, CompatibilityError
from pipeline.exports.formats import export_checkpoint
from tests.checkpoint.foreign.cases import write
from tests.checkpoint.foreign.test_convert import convert
from tests.exports import support

MIXED = {
    "*.attention.dense": "fp8_blocks",
    "*.attention.q_*": "smoothquant",
    "*.experts.*.fc": "fp8",
    "*.shared_expert.*": "int8",
}


def read_config(folder: Path) -> QuantizationConfig:
    """By the library's own classes, which refuse what they do not know in a scheme."""
    return QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])


def find_scheme(config: QuantizationConfig, name: str) -> QuantizationScheme | None:
    if any(match_name(name, each) for each in config.ignore or ()):
        return None
    (scheme,) = [s for s in config.config_groups.values() if any(match_name(name, each) for each in s.targets)]
    return scheme


def decompress(folder: Path) -> dict[str, torch.Tensor]:
    """The hub's state dict as the library decompresses it, module by module."""
    config, state = read_config(folder), support.load_folder(folder)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        name, _, kind = key.rpartition(".")
        modules.setdefault(name, {})[kind] = tensor
    dense = {}
    for name, tensors in modules.items():
        if "weight_scale" not in tensors:
            dense.update({f"{name}.{kind}": tensor for kind, tensor in tensors.items()})
            continue
        scheme = find_scheme(config, name)
        assert scheme is not None, name
        compressor = BaseCompressor.get_value_from_registry(CompressionFormat(scheme.format).value)
        found = compressor.decompress({k: t for k, t in tensors.items() if k != "bias"}, scheme)
        dense[f"{name}.weight"] = found["weight"]
        if "bias" in tensors:
            dense[f"{name}.bias"] = tensors["bias"]
    return dense


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("method", "format"),
    [
        ("gptq", "pack-quantized"),
        ("int8", "pack-quantized"),
        ("fp8", "float-quantized"),
        ("fp8_blocks", "float-quantized"),
        ("smoothquant", "int-quantized"),
    ],
)
def test_transformers_computes_as_the_network_does(name: str, method: str, format: str, tmp_path: Path) -> None:
    """Static inputs are rounded by both. Fused rows across blocks come in float32; o_proj, which SmoothQuant would give
    a vector, is left out."""
    recipe = {"*.attention.dense": "none"} if method == "smoothquant" else None
    engine = support.quantize(name, method, tmp_path, dtype="float32", recipe=recipe)
    report = export_checkpoint(engine, tmp_path / "out", "compressed_tensors", others="16bit")
    config = read_config(tmp_path / "out")
    assert config.format == format
    assert sum(report.quantized.values()) + len(report.widened) == (12 if recipe else 14)
    assert bool(report.widened) == (method == "fp8_blocks")
    # Inputs a rounding error apart may be rounded to two steps of INT8; such a step is 0.6 % of the logits.
    bound = 0.02 if method in ("fp8", "smoothquant") else 1e-4
    assert support.distance(support.logits_of(tmp_path / "out"), support.our_logits(engine)) < bound


def test_types_as_the_format_has_them(tmp_path: Path) -> None:
    engine = support.quantize("llama", "rtn", tmp_path)
    export_checkpoint(engine, tmp_path / "out", "compressed_tensors")
    state = support.load_folder(tmp_path / "out")
    name = "model.layers.1.self_attn.k_proj."
    found = {key.removeprefix(name): (str(t.dtype), tuple(t.shape)) for key, t in state.items() if key.startswith(name)}
    assert found == {
        "weight_packed": ("torch.int32", (64, 16)),
        "weight_scale": ("torch.bfloat16", (64, 2)),
        "weight_shape": ("torch.int64", (2,)),
    }
    assert state[f"{name}weight_shape"].tolist() == [64, 128]
    (group,) = read_config(tmp_path / "out").config_groups.values()
    assert group.weights.group_size == 64
    assert group.input_activations is None


@pytest.mark.parametrize(("method", "kept"), [("int8", "int8"), ("rtn", "int4")])
def test_a_quantized_head_is_a_linear_as_any(method: str, kept: str, tmp_path: Path) -> None:
    engine = support.quantize("llama", "none", tmp_path, dtype="float32", recipe={"lm_head": method})
    report = export_checkpoint(engine, tmp_path / "out", "compressed_tensors")
    assert report.quantized == {kept: 1} and not report.widened
    assert support.distance(support.logits_of(tmp_path / "out"), support.our_logits(engine)) < 1e-4
    report = export_checkpoint(engine, tmp_path / "plain", "hf")
    assert report.widened.keys() == {"lm_head"}
    assert support.distance(support.logits_of(tmp_path / "plain"), support.our_logits(engine)) < 1e-4


@pytest.mark.parametrize(("name", "bound"), [("compressed-fp8-static", 0.02), ("compressed-fp8-dynamic", 1e-4)])
def test_fp8_with_a_scale_for_each_output(name: str, bound: float, tmp_path: Path) -> None:
    """As it comes of others' checkpoints: of q, k and v with scales of their own, or of every row."""
    engine, _ = convert(write(name, tmp_path), tmp_path / "engine", dtype="float32")
    report = export_checkpoint(engine, tmp_path / "out", "compressed_tensors")
    assert report.quantized["fp8_rows"] > 0 and not report.widened
    config = read_config(tmp_path / "out")
    scheme = find_scheme(config, "model.layers.0.self_attn.k_proj")
    assert scheme is not None and scheme.weights is not None and scheme.weights.strategy == "channel"
    assert (scheme.input_activations is not None) == name.endswith("static")
    assert support.distance(support.logits_of(tmp_path / "out"), support.our_logits(engine)) < bound


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_mixed_formats_are_groups(name: str, tmp_path: Path) -> None:
    """Five formats in a routed model: each linear is of one group, what is left alone of none."""
    engine = support.quantize(name, "rtn", tmp_path, recipe=MIXED, group=32, dtype="float32")
    report = export_checkpoint(engine, tmp_path / "out", "compressed_tensors", others="16bit")
    assert report.quantized.keys() == {"int4", "int8", "fp8", "fp8_blocks", "int8_sq"}
    config = read_config(tmp_path / "out")
    assert config.format == "mixed-precision"
    assert sum(len(scheme.targets) for scheme in config.config_groups.values()) < 20  # experts are kinds
    state = support.load_folder(tmp_path / "out")
    for key, tensor in state.items():
        linear = key.endswith(".weight") and tensor.ndim == 2 and tensor.dtype == torch.float32
        if linear and not key.endswith(("embed_tokens.weight", "mlp.gate.weight")):
            assert find_scheme(config, key.removesuffix(".weight")) is None
    dense = {key: tensor for key, tensor in decompress(tmp_path / "out").items() if ".layers.2." not in key}
    found = support.logits_of_state(engine, dense, tmp_path / "dense")
    assert support.distance(found, support.our_logits(engine, wide_inputs=True)) < 1e-4


def test_vectors_have_no_place(tmp_path: Path) -> None:
    engine = support.quantize("llama", "smoothquant", tmp_path)
    with pytest.raises(
        CompatibilityError, match=r"self_attn\.o_proj cannot be exported as compressed_tensors: .*vector"
    ):
        export_checkpoint(engine, tmp_path / "out", "compressed_tensors")
    assert not (tmp_path / "out").exists()


def test_scales_of_another_type_than_the_models(tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.layers.0.mlp.proj.weights_scaling_factor"] += 1e-5

    engine = support.damage(support.quantize("llama", "rtn", tmp_path), damage)
    with pytest.raises(CheckpointError, match="INT4 scales are no bfloat16"):
        export_checkpoint(engine, tmp_path / "out", "compressed_tensors")
    assert sorted(path.name for path in tmp_path.glob("*out*")) == []
