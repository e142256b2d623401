"""The conversion proof: silent on right conversions, in the same type or another, and names what was changed."""

from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.evaluation.conversion_proof import prove_conversion
from pipeline.progress import SILENT
from tests import fixtures
from tests.evaluation.support import Altered, convert


@pytest.fixture(scope="module", params=["llama", "deepseek_v2"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    write = getattr(fixtures, request.param)
    return CheckpointFolder.open(write(tmp_path_factory.mktemp(request.param) / "hf", num_hidden_layers=2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_right_conversions_reproduce_every_tensor(source: CheckpointFolder, tmp_path: Path, dtype: str) -> None:
    proof = prove_conversion(source, convert(source.path, tmp_path, dtype), SILENT)
    assert proof.differing == {}
    assert proof.tensors == len(source.tensors)


def flip_one_bit(w: torch.Tensor) -> torch.Tensor:
    flat = w.reshape(-1).view(torch.int16)
    flat[flat.numel() // 2] ^= 1
    return w


def test_a_single_flipped_bit_is_found_and_named(source: CheckpointFolder, tmp_path: Path) -> None:
    engine = convert(source.path, tmp_path, "bfloat16")
    altered = Altered(engine, {"transformer.layers.1.attention.dense.weight": flip_one_bit})
    proof = prove_conversion(source, altered, SILENT)  # type: ignore[arg-type]
    assert proof.differing == {"model.layers.1.self_attn.o_proj.weight": 1}


def test_minus_zero_is_not_zero(tmp_path: Path) -> None:
    def zero(tensors: fixtures.Tensors) -> None:
        tensors["model.norm.weight"][7] = 0.0

    source = CheckpointFolder.open(fixtures.llama(tmp_path / "hf", edit=zero))
    engine = convert(source.path, tmp_path / "engine", "bfloat16")

    def negate(w: torch.Tensor) -> torch.Tensor:
        w[7] = -0.0
        return w

    altered = Altered(engine, {"transformer.ln_f.weight": negate})
    assert prove_conversion(source, altered, SILENT).differing == {"model.norm.weight": 1}  # type: ignore[arg-type]


def test_clipped_weights_are_counted_and_must_sit_at_the_types_largest_value(tmp_path: Path) -> None:
    def enlarge(tensors: fixtures.Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][0, :3] = 1e6

    source = CheckpointFolder.open(fixtures.llama(tmp_path / "hf", edit=enlarge))
    from pipeline.checkpoint.convert import convert_checkpoint
    from pipeline.workspace import FolderWorkspace

    convert_checkpoint(source, FolderWorkspace(tmp_path / "engine"), dtype="float16", overflow="clip")
    engine = CheckpointFolder.open(tmp_path / "engine")
    proof = prove_conversion(source, engine, SILENT)
    assert (proof.differing, proof.clipped) == ({}, 3)
    wrong = Altered(engine, {"transformer.layers.0.mlp.gate.weight": lambda w: w.clamp(-100, 100)})
    assert prove_conversion(source, wrong, SILENT).differing == {"model.layers.0.mlp.up_proj.weight": 3}  # type: ignore[arg-type]
