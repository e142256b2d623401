"""The engine checkpoint under the hub's names again: the source's own tensors, and what INT4 stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.hub_weights import hf_layer_state, hf_outer_state
from pipeline.checkpoint.reference import build_hf_layer
from pipeline.errors import CheckpointError
from tests.exports.test_hf import CASES, convert


@pytest.mark.parametrize(("write", "options"), CASES)
def test_states_are_the_sources(write: Any, options: dict[str, Any], tmp_path: Path) -> None:
    source = CheckpointFolder.open(write(tmp_path / "hf", **options))
    engine = convert(source.path, tmp_path / "engine")
    found = hf_outer_state(engine, engine.architecture)
    for layer in range(engine.architecture.num_layers):
        state = hf_layer_state(engine, engine.architecture, layer)
        found |= {f"model.layers.{layer}.{name}": tensor for name, tensor in state.items()}
        build_hf_layer(engine.config, layer, state, torch.float32)  # complete, and of the shapes transformers wants
    beyond = f"model.layers.{engine.architecture.num_layers}."  # what the decoder has no use for
    assert found.keys() == {n for n in source.tensors if not n.startswith(beyond) and not n.endswith("_scale_inv")}
    plain = [name for name in found if source.tensors[name].dtype != "F8_E4M3"]  # for FP8 see test_fp8_sources.py
    assert len(plain) > 10
    assert all(torch.equal(found[name], source.read(name).to_torch()) for name in plain)


def test_int4_comes_back_as_the_matrix_it_stands_for(llama_path: Path, tmp_path: Path) -> None:
    """Nibbles unpacked by hand: y = (q * scale) @ (x * prequant) = (q * scale * prequant) @ x."""
    engine = convert(llama_path, tmp_path / "engine", "float16")
    base = "transformer.layers.1.mlp.proj"
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (128, 256), generator=generator)
    scales = torch.rand(128, 4, generator=generator).half().float()
    prequant = (0.5 + torch.rand(256, generator=generator)).half()
    packed = ((q[0::2] & 15) | ((q[1::2] & 15) << 4)).to(torch.uint8).view(torch.int8)
    shard = engine.file_of(f"{base}.weight")
    tensors = load_file(shard)
    added = {"weight": packed, "weights_scaling_factor": scales, "prequant_scaling_factor": prequant}
    (tmp_path / "quantized").mkdir()
    save_file(tensors | {f"{base}.{name}": t for name, t in added.items()}, tmp_path / "quantized/model.safetensors")
    others = {
        n: engine.read(n).to_torch().clone()
        for n in engine.tensors
        if engine.file_of(n) != shard
    }  # fmt: skip
    merged = load_file(tmp_path / "quantized/model.safetensors") | others
    save_file(merged, tmp_path / "quantized/model.safetensors")
    (tmp_path / "quantized/config.json").write_bytes((engine.path / "config.json").read_bytes())
    quantized = CheckpointFolder.open(tmp_path / "quantized")
    weight = hf_layer_state(quantized, quantized.architecture, 1)["mlp.down_proj.weight"]
    expected = q.double() * scales.double().repeat_interleave(64, 1) * prequant.double()
    assert weight.dtype == torch.float32
    assert (weight.double() - expected).abs().max() < 1e-6


def test_engine_that_lacks_a_tensor_is_refused(llama_path: Path, tmp_path: Path) -> None:
    engine = convert(llama_path, tmp_path / "engine")
    remaining = dict(engine.tensors)
    del remaining["transformer.layers.1.mlp.fc.weight"]
    engine.tensors = remaining
    with pytest.raises(CheckpointError, match=r"lacks transformer\.layers\.1\.mlp\.fc\.weight"):
        hf_layer_state(engine, engine.architecture, 1)
