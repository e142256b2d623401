"""There and back: the exported folder holds the source's tensors byte for byte, and the layers compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoints
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.export import export_checkpoint, hf_layer_state, hf_outer_state
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.reference import build_hf_layer
from pipeline.errors import CheckpointError
from pipeline.workspace import FolderWorkspace
from tests import fixtures

SHIPPED = [p.parent for p in sorted(Path(checkpoints.__file__).parent.glob("*/config.json"))]
CASES: list[tuple[Any, dict[str, Any]]] = [
    (fixtures.llama, {}),
    (fixtures.llama, {"attention_bias": True, "mlp_bias": True, "dtype": "float16"}),
    (fixtures.llama, {"tie_word_embeddings": True, "shards": 1}),
    (fixtures.qwen2, {}),
    (fixtures.deepseek_moe, {"tokenizer": True}),
    (fixtures.deepseek_v3, {}),
    (fixtures.deepseek_v3, {"fp8": True, "tokenizer": True}),
    (fixtures.deepseek_v2, {"tokenizer": True}),
    (fixtures.deepseek_v2, {"q_lora_rank": None, "dtype": "float32", "attention_bias": True}),
]


def convert(source: Path, output: Path, dtype: str | None = None) -> CheckpointFolder:
    workspace = FolderWorkspace(output, journal=output.with_name(output.name + ".journal"))
    convert_checkpoint(CheckpointFolder.open(source), workspace, dtype=dtype, overflow="refuse", max_shard=1_000_000)
    return CheckpointFolder.open(output)


def assert_same_folder(source: Path, exported: Path) -> None:
    ours, theirs = (
        {n: t for f in path.glob("*.safetensors") for n, t in load_file(f).items()} for path in (exported, source)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert ours[name].shape == tensor.shape
        assert np.array_equal(*(t.contiguous().view(-1).view(torch.uint8).numpy() for t in (ours[name], tensor))), name
    for file in source.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name and file.suffix in (".json", ".model"):
            assert (exported / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(("write", "options"), CASES)
def test_fixtures_come_back_bit_for_bit(write: Any, options: dict[str, Any], tmp_path: Path) -> None:
    source = write(tmp_path / "hf", **options)
    export_checkpoint(convert(source, tmp_path / "engine"), tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "engine", "engine.journal", "hf"]


@pytest.mark.parametrize("stated", [{}, {"torch_dtype": None}, {"torch_dtype": "float32"}, {"dtype": "float16"}])
def test_config_comes_back_whatever_it_said_of_the_type(stated: dict[str, Any], tmp_path: Path) -> None:
    source = fixtures.llama(tmp_path / "hf", num_hidden_layers=1)
    config = json.loads((source / "config.json").read_text())
    del config["torch_dtype"]
    (source / "config.json").write_text(json.dumps(config | stated, indent=2) + "\n")
    engine = convert(source, tmp_path / "engine")
    assert engine.architecture.dtype == "bfloat16"
    export_checkpoint(engine, tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")
    export_checkpoint(convert(source, tmp_path / "wide", "float32"), tmp_path / "wide-back")
    assert CheckpointFolder.open(tmp_path / "wide-back").architecture.dtype == "float32"


@pytest.mark.parametrize("source", SHIPPED, ids=lambda p: p.name)
def test_shipped_checkpoints_come_back_bit_for_bit(source: Path, tmp_path: Path) -> None:
    export_checkpoint(convert(source, tmp_path / "engine"), tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


def test_two_checkpoints_ship() -> None:
    assert {path.name for path in SHIPPED} >= {"deepseek-v2-tiny", "deepseek-coder-tiny"}


def test_transformers_loads_an_export_of_another_type(deepseek_v2_path: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    export_checkpoint(convert(deepseek_v2_path, tmp_path / "engine", "float32"), tmp_path / "back")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
            for path in (tmp_path / "back", deepseek_v2_path)
        )
    assert torch.equal(ours, theirs)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "float32"


def test_what_cannot_be_exported_is_refused(llama_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not an engine checkpoint"):
        export_checkpoint(CheckpointFolder.open(llama_path), tmp_path / "back")
    engine = convert(llama_path, tmp_path / "engine")
    with pytest.raises(CheckpointError, match="exists already"):
        export_checkpoint(engine, llama_path)
    engine.config["trtseek"]["quantization"] = {"method": "rtn"}
    with pytest.raises(CheckpointError, match="is quantized"):
        export_checkpoint(engine, tmp_path / "back")
    assert not (tmp_path / "back").exists()


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
