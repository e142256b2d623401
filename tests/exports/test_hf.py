"""Plain Hugging Face folders: the source's own tensors byte for byte, what was quantized in 16 bits, DeepSeek's FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.quantizers.quantizers_utils import should_convert_module

import checkpoints
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import CheckpointError
from pipeline.exports.folder import new_folder
from pipeline.exports.formats import export_checkpoint
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.exports import support

SHIPPED = [p.parent for p in sorted(Path(checkpoints.__file__).parent.glob("*/config.json"))]
CASES: list[tuple[Any, dict[str, Any]]] = [
    (fixtures.llama, {}),
    (fixtures.llama, {"attention_bias": True, "mlp_bias": True, "dtype": "float16"}),
    (fixtures.llama, {"tie_word_embeddings": True, "shards": 1}),
    (fixtures.qwen2, {}),
    (fixtures.deepseek_moe, {"tokenizer": True}),
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
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(("name", "method"), [("llama", "awq"), ("qwen2", "smoothquant"), ("v2", "gptq")])
def test_what_was_quantized_is_loaded_and_computes_the_same(name: str, method: str, tmp_path: Path) -> None:
    """In a float32 model nothing is rounded; vectors before a linear are multiplied into it."""
    engine = support.quantize(name, method, tmp_path, dtype="float32", num_hidden_layers=2)
    report = export_checkpoint(engine, tmp_path / "back")
    assert set(report.widened.values()) == {f"hf has no place for {'int8_sq' if method == 'smoothquant' else 'int4'}"}
    assert not report.quantized
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config.keys().isdisjoint({"trtseek", "quantization_config"})
    ours = support.our_logits(engine, wide_inputs=True)
    assert support.distance(support.logits_of(tmp_path / "back"), ours) < 1e-4


def test_blocks_of_fp8_become_deepseeks_own(tmp_path: Path) -> None:
    """Of a 16-bit model rounded to FP8 blocks: X.weight_scale_inv, multiplied out by hand, and what is left alone."""
    engine = support.quantize("v3", "fp8_blocks", tmp_path, recipe={"*.attention.*": "none"})
    report = export_checkpoint(engine, tmp_path / "back")
    state = support.load_folder(tmp_path / "back")
    stored = {name for name, tensor in state.items() if tensor.dtype == torch.float8_e4m3fn}
    assert report.quantized == {"fp8_blocks": len(stored)} and len(stored) > 50
    for name in stored:
        scales = state.pop(f"{name}_scale_inv").repeat_interleave(128, 0).repeat_interleave(128, 1)
        rows, columns = state[name].shape
        state[name] = state[name].float() * scales[:rows, :columns]
    dense = {name: tensor for name, tensor in state.items() if ".layers.2." not in name}
    found = support.logits_of_state(engine, dense, tmp_path / "dense")
    assert support.distance(found, support.our_logits(engine)) < 1e-4
    quantization = json.loads((tmp_path / "back/config.json").read_text())["quantization_config"]
    assert {**quantization, "modules_to_not_convert": 0} == {**fixtures.FP8_CONFIG, "modules_to_not_convert": 0}
    for name, tensor in support.load_folder(tmp_path / "back").items():
        if tensor.ndim == 2 and name.endswith(".weight") and not name.endswith(("embed_tokens.weight", "gate.weight")):
            name = name.removesuffix(".weight")
            converted = should_convert_module(name, quantization["modules_to_not_convert"])
            assert converted == (f"{name}.weight" in stored), name


def test_a_weight_beyond_the_models_range_is_refused(tmp_path: Path) -> None:
    def enlarge(tensors: fixtures.Tensors) -> None:
        tensors["transformer.layers.0.mlp.proj.weights_scaling_factor"] *= 1e30

    engine = support.damage(support.quantize("llama", "rtn", tmp_path, dtype="float16"), enlarge)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.proj\.weight does not fit float16"):
        export_checkpoint(engine, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_two_exports_of_one_name(tmp_path: Path) -> None:
    """The later one is refused, and leaves what the other made."""
    with pytest.raises(CheckpointError, match="was made meanwhile"), new_folder(tmp_path / "out") as folder:
        (folder / "mine").touch()
        (tmp_path / "out").mkdir()
        (tmp_path / "out/theirs").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]
