"""DeepSeek-V3 in FP8 blocks through conversion and back: kept, multiplied out, killed, damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.hub_weights import hf_layer_state
from pipeline.errors import CheckpointError
from pipeline.evaluation.conversion_proof import prove_conversion
from pipeline.exports.formats import export_checkpoint
from pipeline.progress import SILENT
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.evaluation.support import Altered
from tests.exports.test_hf import assert_same_folder

BIAS = "mlp.router.e_score_correction_bias"
# Widths that 128 does not divide, above and below it: blocks are ragged in rows, in columns and in both.
RAGGED = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "kv_lora_rank": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    path = tmp_path_factory.mktemp("v3") / "hf"
    return CheckpointFolder.open(fixtures.deepseek_v3(path, fp8=True, num_hidden_layers=2, **RAGGED))


def convert(
    source: CheckpointFolder, output: Path, dtype: str | None = None, overflow: str = "refuse"
) -> CheckpointFolder:
    workspace = FolderWorkspace(output, journal=output.with_name(output.name + ".journal"))
    convert_checkpoint(source, workspace, dtype=dtype, overflow=overflow, max_shard=400_000)
    return CheckpointFolder.open(output)


def load_all(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def expand(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.float() * scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def test_kept_with_its_scales_and_back_bit_for_bit(source: CheckpointFolder, tmp_path: Path) -> None:
    engine = convert(source, tmp_path / "engine")
    stored, original = load_all(engine.path), load_all(source.path)
    name = "transformer.layers.1.mlp.experts.5.gate"
    assert stored[f"{name}.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(
        stored[f"{name}.weights_block_scaling_factor"],
        original["model.layers.1.mlp.experts.5.up_proj.weight_scale_inv"],
    )
    assert stored[f"transformer.layers.1.{BIAS}"].dtype == torch.float32
    assert len(stored) == len(original)
    own = engine.config["trtseek"]
    assert (own["dtype"], own["fp8_blocks"], engine.architecture.dtype) == ("bfloat16", [128, 128], "bfloat16")
    proof = prove_conversion(source, engine, SILENT)
    assert (proof.differing, proof.tensors) == ({}, len(source.tensors))
    export_checkpoint(engine, tmp_path / "back")
    assert_same_folder(source.path, tmp_path / "back")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_multiplied_out_on_request(dtype: str, source: CheckpointFolder, tmp_path: Path) -> None:
    engine = convert(source, tmp_path / "engine", dtype)
    stored, original = load_all(engine.path), load_all(source.path)
    assert not any("scaling_factor" in name for name in stored)
    for target, name in (
        ("transformer.layers.0.mlp.proj.weight", "model.layers.0.mlp.down_proj.weight"),
        (
            "transformer.layers.1.attention.kv_a_proj_with_mqa.weight",
            "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        ),
        ("transformer.mtp_layers.0.attention.dense.weight", "model.layers.2.self_attn.o_proj.weight"),
    ):
        expected = expand(original[name], original[f"{name}_scale_inv"]).to(getattr(torch, dtype))
        assert torch.equal(stored[target], expected), name
    bias = original["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(stored[f"transformer.layers.1.{BIAS}"], bias)
    assert "quantization_config" not in engine.config
    assert "fp8_blocks" not in engine.config["trtseek"]
    proof = prove_conversion(source, engine, SILENT)
    scales = sum(name.endswith("_scale_inv") for name in original)
    assert (proof.differing, proof.tensors) == ({}, len(original) - scales)
    report = json.loads((engine.path / "conversion.json").read_text())
    assert report["casts"][f"F8_E4M3 -> {fixtures_type(dtype)}"] == scales
    export_checkpoint(engine, tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


def fixtures_type(dtype: str) -> str:
    return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]


def test_what_the_reference_is_given_is_the_product(source: CheckpointFolder, tmp_path: Path) -> None:
    engine, original = convert(source, tmp_path / "engine"), load_all(source.path)
    state = hf_layer_state(engine, engine.architecture, 1)
    name = "self_attn.kv_b_proj.weight"
    scales = original[f"model.layers.1.{name}_scale_inv"]
    assert torch.equal(state[name], expand(original[f"model.layers.1.{name}"], scales))
    assert state["mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_the_proof_finds_what_conversion_could_get_wrong(source: CheckpointFolder, tmp_path: Path) -> None:
    base = "transformer.layers.0.mlp.fc"
    hub = "model.layers.0.mlp.gate_proj.weight"
    kept, wide = convert(source, tmp_path / "kept"), convert(source, tmp_path / "wide", "bfloat16")

    def flip(w: torch.Tensor) -> torch.Tensor:
        w.view(torch.uint8)[3, 4] ^= 1
        return w

    def next_block(w: torch.Tensor) -> torch.Tensor:
        w[128] = w[128].float() * 1.5  # as a scale of the block above would
        return w

    faults = [
        (kept, f"{base}.weight", flip, hub),
        (kept, f"{base}.weights_block_scaling_factor", lambda s: s.flip(0), f"{hub}_scale_inv"),
        (wide, f"{base}.weight", next_block, hub),
        (wide, f"transformer.layers.1.{BIAS}", lambda b: b + 1e-6, "model.layers.1.mlp.gate.e_score_correction_bias"),
    ]
    for engine, name, edit, found in faults:
        proof = prove_conversion(source, Altered(engine, {name: edit}), SILENT)  # type: ignore[arg-type, dict-item]
        assert list(proof.differing) == [found]


def test_a_correction_bias_in_16_bits_is_a_fault(tmp_path: Path) -> None:
    """Even where every value happens to fit: the type itself must stay."""
    name = f"transformer.layers.1.{BIAS}"
    hub = CheckpointFolder.open(fixtures.deepseek_v3(tmp_path / "hf", num_hidden_layers=2, mtp=False))
    engine = convert(hub, tmp_path / "engine", "bfloat16")
    altered = Altered(engine, {name: lambda b: b.bfloat16()})
    altered.tensors = {
        n: info if n != name else type(info)(n, "BF16", info.shape) for n, info in engine.tensors.items()
    }
    assert prove_conversion(hub, altered, SILENT).differing == {  # type: ignore[arg-type]
        "model.layers.1.mlp.gate.e_score_correction_bias": -1
    }


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("what", ["weight", "scale"])
def test_damage_stops_conversion(what: str, dtype: str | None, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"

    def damage(tensors: fixtures.Tensors) -> None:
        if what == "weight":
            tensors[name].view(torch.uint8)[3, 4] = 0x7F
        else:
            tensors[f"{name}_scale_inv"][0, 0] = torch.nan

    path = fixtures.deepseek_v3(tmp_path / "hf", fp8=True, num_hidden_layers=2, edit=damage)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        convert(CheckpointFolder.open(path), tmp_path / "engine", dtype)


def test_what_does_not_fit_float16_is_counted_or_clipped(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def enlarge(tensors: fixtures.Tensors) -> None:
        tensors[f"{name}_scale_inv"][1, 0] = 1e3

    hub = CheckpointFolder.open(
        fixtures.deepseek_v3(tmp_path / "hf", fp8=True, num_hidden_layers=1, mtp=False, edit=enlarge)
    )
    with pytest.raises(CheckpointError, match=r"1 tensor does not fit float16; worst is model\.layers\.0\.mlp\.up"):
        convert(hub, tmp_path / "refused", "float16")
    engine = convert(hub, tmp_path / "clipped", "float16", overflow="clip")
    assert load_all(engine.path)["transformer.layers.0.mlp.gate.weight"].abs().max() == 65504
    assert prove_conversion(hub, engine, SILENT).differing == {}


def test_a_fused_weight_keeps_fp8_only_in_whole_blocks(tmp_path: Path) -> None:
    """No published Llama or Qwen2 comes so, but FP8 must not be lost or misread in silence."""

    def write(folder: Path, heads: int) -> CheckpointFolder:
        options = {"hidden_size": 128, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": heads}
        config = {"quantization_config": fixtures.FP8_CONFIG, "num_hidden_layers": 1}
        return CheckpointFolder.open(fixtures.qwen2(folder, edit=fixtures.quantize_fp8, **options, **config))

    aligned = write(tmp_path / "aligned", 1)
    engine = convert(aligned, tmp_path / "engine")
    assert engine.tensors["transformer.layers.0.attention.qkv.weights_block_scaling_factor"].shape == (4, 1)
    assert prove_conversion(aligned, engine, SILENT).differing == {}
    export_checkpoint(engine, tmp_path / "back")
    assert_same_folder(aligned.path, tmp_path / "back")
    ragged = CheckpointFolder.open(
        fixtures.qwen2(tmp_path / "ragged", edit=fixtures.quantize_fp8, num_hidden_layers=1, hidden_size=192)
    )
    with pytest.raises(CheckpointError, match="not multiples of 128"):
        convert(ragged, tmp_path / "refused")
    assert prove_conversion(ragged, convert(ragged, tmp_path / "wide", "bfloat16"), SILENT).differing == {}


class _Killed(BaseException):
    """Not an Exception: nothing on the way may catch it."""


class _Bomb:
    """Progress that ends the run once so many bytes are done; 0: never."""

    def __init__(self, after: int) -> None:
        self.left, self.done = after, 0.0

    def start(self, item: str, total: float, unit: str) -> None: ...
    def note(self, message: str) -> None: ...

    def advance(self, amount: float) -> None:
        self.done += amount
        if self.left and self.done > self.left:
            raise _Killed


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_killed_conversion_goes_on_and_ends_in_the_same_bytes(
    dtype: str | None, source: CheckpointFolder, tmp_path: Path
) -> None:
    def run(output: Path, progress: _Bomb) -> None:
        workspace = FolderWorkspace(output, journal=output.with_name(output.name + ".journal"))
        convert_checkpoint(source, workspace, dtype=dtype, overflow="refuse", progress=progress, max_shard=400_000)

    run(tmp_path / "whole", _Bomb(0))
    for after in (1, 700_000, 1_200_000):
        with pytest.raises(_Killed):
            run(tmp_path / "killed", _Bomb(after))
    run(tmp_path / "killed", _Bomb(0))
    whole, killed = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(whole[name] == killed[name] for name in whole)
