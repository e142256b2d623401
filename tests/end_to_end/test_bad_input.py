"""Damaged checkpoints at the command line: the exit code, the file or tensor named, and nothing left behind."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import fixtures
from tests.end_to_end.support import write_project


def drop_shard(model: Path) -> None:
    (model / "model-00002-of-000003.safetensors").unlink()


def truncate(model: Path) -> None:
    shard = model / "model-00002-of-000003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])


def lie_in_header(model: Path) -> None:
    """Two tensors over the same bytes."""
    shard = model / "model-00001-of-000003.safetensors"
    data = shard.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    text = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))

    return edit


def only_pickle(model: Path) -> None:
    for shard in model.glob("*.safetensors*"):
        shard.unlink()
    torch.save({"w": torch.zeros(1)}, model / "pytorch_model.bin")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing shard": (drop_shard, "model-00002-of-000003.safetensors is missing"),
    "truncated shard": (truncate, "model-00002-of-000003.safetensors"),
    "lying header": (lie_in_header, "model-00001-of-000003.safetensors"),
    "unknown architecture": (edit_config(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "config contradicts tensors": (edit_config(intermediate_size=384), "intermediate_size"),
    "pickle": (only_pickle, "pytorch_model.bin"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(damage: str, tmp_path: Path, llama_path: Path) -> None:
    shutil.copytree(llama_path, tmp_path / "model")
    edit, named = DAMAGES[damage]
    edit(tmp_path / "model")
    project = write_project(tmp_path, tmp_path / "model")
    result = project.trtseek("engine", "tiny.yaml")
    assert result.returncode == 3, result.stderr
    assert named in result.stderr
    assert "hint" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "out").glob("store/convert/*"))


@pytest.mark.parametrize(("value", "named"), [(float("nan"), "nan"), (1e38, "float16")])
def test_weights_that_cannot_be_converted_name_their_tensor(tmp_path: Path, value: float, named: str) -> None:
    tensor = "model.layers.1.mlp.down_proj.weight"

    def spoil(tensors: fixtures.Tensors) -> None:
        tensors[tensor][3, 5] = value

    fixtures.llama(tmp_path / "model", edit=spoil, tokenizer=True)
    project = write_project(tmp_path, tmp_path / "model")
    result = project.trtseek("engine", "tiny.yaml")
    assert result.returncode == 3, result.stderr
    assert tensor in result.stderr
    assert named in result.stderr.lower()
    assert not list((tmp_path / "out").glob("store/convert/*"))
