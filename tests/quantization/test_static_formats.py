"""The 8-bit methods on every architecture, from the hub's weights to what the folder holds and stands for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.hub_weights import hf_layer_state
from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.reference import build_hf_layer
from pipeline.errors import QuantizationError
from pipeline.network.spec import NetworkSpec
from pipeline.network.widening import widen_inputs
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.quantization.selection import Override, Rules
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.network.models import read_program
from tests.network.serving import prompts, reference_logits, serve
from tests.quantization.support import CalibrationSettings, Model, Settings

ALL = ("experts", "shared_experts", "mlp", "attention_output", "attention_input")
WRITE: dict[str, Callable[..., Path]] = {
    "llama": fixtures.llama,
    "qwen2": fixtures.qwen2,
    "v2": fixtures.deepseek_v2,
    "v3": fixtures.deepseek_v3,
}
# Relative error of each weight, of its RMS: an E4M3 mantissa of three bits, INT8 of a channel's maximum.
BOUND = {"fp8": 0.06, "fp8_blocks": 0.04, "int8": 0.012}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("".join(f"def f{i}(x):\n    return {i * 7919 % 1000} * x\n" for i in range(800)))
    return path


def _quantize(name: str, method: str, text: Path, path: Path, **options: object) -> tuple[Model, CheckpointFolder]:
    hub = WRITE[name](path / "hf", tokenizer=True, num_hidden_layers=2)
    model = Model.load(hub)
    source = model.write(path / "engine", hub)
    settings = Settings(
        method=method,
        include=ALL,
        calibration=CalibrationSettings(files=(text,), samples=24, length=32),
        unrouted_experts="share_scale",
        **options,  # type: ignore[arg-type]
    )
    workspace = FolderWorkspace(path / "out", journal=path / "out.journal")
    quantize_checkpoint(source, workspace, settings=settings)
    return model, CheckpointFolder.open(path / "out")


@pytest.mark.parametrize("method", ["fp8", "fp8_blocks", "int8", "smoothquant"])
@pytest.mark.parametrize("name", WRITE)
def test_what_is_stored_stands_for_the_weights(name: str, method: str, text: Path, tmp_path: Path) -> None:
    model, found = _quantize(name, method, text, tmp_path)
    own = json.loads((tmp_path / "out" / "config.json").read_text())["trtseek"]
    chosen = own["quantization"]["quantized"]
    assert len(chosen) == sum(
        m.role in ALL and m.target.endswith(".weight") for m in layout_for(model.architecture).mappings()
    )
    assert ("fp8_blocks" in own) == (method == "fp8_blocks")
    assert own["quantization"]["group_size"] is None and own["quantization"]["kv_cache_quant_algo"] is None
    for base in chosen:
        _check_tensors(base, method, model.source.values[f"{base}.weight"].float(), found)
    if method == "smoothquant":
        return  # folded scales move between tensors: the layers' outputs are compared below
    for layer in range(2):
        state = hf_layer_state(found, model.architecture, layer)
        before = hf_layer_state(model.source, model.architecture, layer)
        for key, value in before.items():
            error = (state[key].float() - value.float()).norm() / value.float().norm()
            assert error < BOUND[method], key


def _check_tensors(base: str, method: str, weight: torch.Tensor, found: CheckpointFolder) -> None:
    tensors = {
        name.removeprefix(f"{base}."): found.read(name).to_torch()
        for name in found.tensors
        if name.rpartition(".")[0] == base
    }
    types = {kind: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for kind, t in tensors.items()}
    types.pop("bias", None)
    rows, columns = weight.shape
    scale = {"weights_scaling_factor": ("float32", (1,)), "activation_scaling_factor": ("float32", (1,))}
    if method == "fp8":
        assert types == {"weight": ("float8_e4m3fn", (rows, columns)), **scale}
        step = weight.abs().max() / 448
        assert torch.equal(tensors["weights_scaling_factor"][0], step)
        nearest = (weight / step).to(torch.float8_e4m3fn).float()
        assert not torch.equal(tensors["weight"].float(), nearest)  # GPTQ's, which is not always the nearest
    elif method == "fp8_blocks":
        blocks = ("float32", (-(-rows // 128), -(-columns // 128)))
        assert types == {"weight": ("float8_e4m3fn", (rows, columns)), "weights_block_scaling_factor": blocks}
    elif method == "int8":
        assert types == {"weight": ("int8", (rows, columns)), "per_channel_scale": ("float32", (rows,))}
        steps = weight.abs().amax(1) / 127
        assert torch.equal(tensors["weight"].float(), (weight / steps[:, None]).round())
    else:
        types.pop("prequant_scaling_factor", None)
        scale["weights_scaling_factor"] = ("float32", (rows,))
        assert types == {"weight": ("int8", (rows, columns)), **scale}


@pytest.mark.parametrize("name", WRITE)
def test_smoothed_layers_compute_nearly_the_same(name: str, text: Path, tmp_path: Path) -> None:
    model, found = _quantize(name, "smoothquant", text, tmp_path)
    hidden = torch.randn(2, 24, model.architecture.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        expected = model.run_layer(layer, model.source.values, hidden) - hidden
        state = hf_layer_state(found, model.architecture, layer)
        merged = {m.target: m.forward([state[s.removeprefix(f"model.layers.{layer}.")] for s in m.sources])
                  for m in layout_for(model.architecture).layer_mappings(layer)
                  if m.sources[0].removeprefix(f"model.layers.{layer}.") in state}  # fmt: skip
        error = (model.run_layer(layer, merged, hidden) - hidden - expected).norm() / expected.norm()
        assert error < 0.02


@pytest.mark.parametrize("method", ["fp8", "smoothquant"])
def test_the_experts_of_a_layer_share_their_inputs_ranges(method: str, text: Path, tmp_path: Path) -> None:
    model, found = _quantize("v3", method, text, tmp_path)
    experts = model.architecture.experts
    assert experts is not None
    for projection in ("fc", "gate", "proj"):
        names = [f"transformer.layers.1.mlp.experts.{e}.{projection}.activation_scaling_factor" for e in range(8)]
        assert len({float(found.read(name).to_torch()) for name in names}) == 1
    fc, gate = (
        float(found.read(f"transformer.layers.1.mlp.experts.0.{p}.activation_scaling_factor").to_torch())
        for p in ("fc", "gate")
    )
    assert fc == gate


def test_experts_that_no_token_reached_are_named(tmp_path: Path) -> None:
    """Where none of a layer was: nothing says how large their inputs are."""
    text = tmp_path / "short.txt"
    text.write_text("def f(x):\n    return x\n" * 20)
    hub = fixtures.deepseek_v3(tmp_path / "hf", tokenizer=True, num_hidden_layers=2)
    source = Model.load(hub).write(tmp_path / "engine", hub)
    settings = Settings(method="fp8", include=ALL, calibration=CalibrationSettings(files=(text,), samples=1, length=8))
    workspace = FolderWorkspace(tmp_path / "out", journal=tmp_path / "out.journal")
    with pytest.raises(QuantizationError, match=r"layers\.1\.mlp\.experts\.0\.fc: no calibration token reached it"):
        quantize_checkpoint(source, workspace, settings=settings)


@pytest.mark.parametrize("moe", ["dense", "gather"])
def test_a_recipe_mixes_formats_and_the_network_computes_with_them(moe: str, text: Path, tmp_path: Path) -> None:
    """Five formats in one routed model, from rules to logits: those of transformers on the dequantized weights."""
    hub = fixtures.deepseek_v3(tmp_path / "hf", tokenizer=True, num_hidden_layers=2)
    model = Model.load(hub)
    source = model.write(tmp_path / "engine", hub)
    settings = Mixed(
        method="rtn",
        include=ALL,
        group_size=32,
        calibration=CalibrationSettings(files=(text,), samples=24, length=32),
        unrouted_experts="share_scale",
    )
    quantize_checkpoint(source, FolderWorkspace(tmp_path / "out", journal=tmp_path / "j"), settings=settings)
    found = CheckpointFolder.open(tmp_path / "out")
    own = json.loads((tmp_path / "out" / "config.json").read_text())["trtseek"]["quantization"]
    assert own["quant_algo"] == "MIXED_PRECISION"
    formats = Counter(linear["format"] for linear in own["quantized"].values())
    assert formats.keys() == {"int4", "fp8", "fp8_blocks", "int8", "int8_sq"}
    sequences = prompts(model.architecture.vocab_size)[:1]
    spec = NetworkSpec(dtype=model.architecture.dtype, block_size=8, max_seq_len=256, moe=moe)
    program = widen_inputs(read_program(spec, model.architecture, found))
    (served,) = serve(program, sequences=sequences, steps=[(len(sequences[0]),)])
    reference = AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32, attn_implementation="eager")
    for layer in range(2):
        state = hf_layer_state(found, model.architecture, layer)
        module = build_hf_layer(model.config, layer, state, torch.float32)
        reference.model.layers[layer].load_state_dict(module.state_dict())
    expected = reference_logits(reference.eval(), sequences[0])
    assert (served["logits"] - expected).abs().max() < 1e-5


@dataclass(frozen=True, kw_only=True)
class Mixed(Settings):
    """With a recipe."""

    @property
    def rules(self) -> Rules:
        rows = {
            "*.attention.dense": "fp8_blocks",
            "*.attention.q_*": "smoothquant",
            "*.experts.*.fc": "fp8",
            "*.experts.*.proj": "smoothquant",
            "*.shared_expert.*": "int8",
        }
        recipe = tuple(Override(pattern=pattern, method=method) for pattern, method in rows.items())
        return replace(Rules(method="rtn", include=ALL, group_size=32), recipe=recipe)
