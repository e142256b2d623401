"""Differences of two checkpoints against torch's own arithmetic."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint import difference
from pipeline.checkpoint.difference import compare_tensors
from pipeline.checkpoint.folder import CheckpointFolder
from tests import fixtures


def pair(tmp_path: Path, edit: object, **options: object) -> tuple[CheckpointFolder, CheckpointFolder]:
    a = fixtures.llama(tmp_path / "a", num_hidden_layers=1)
    b = fixtures.llama(tmp_path / "b", num_hidden_layers=1, edit=edit, **options)
    return CheckpointFolder.open(a), CheckpointFolder.open(b)


def test_nothing_differs_however_it_is_cut_into_files(tmp_path: Path) -> None:
    a, b = pair(tmp_path, None, shards=1)
    found = compare_tensors(a, b)
    assert not found
    assert found.same == len(a.tensors)


def test_changed_values_are_counted_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "PIECE", 1000)  # several pieces, the last of them short
    name = "model.layers.0.mlp.down_proj.weight"
    edited: dict[str, torch.Tensor] = {}

    def edit(tensors: fixtures.Tensors) -> None:
        edited["before"] = tensors[name].clone()
        tensors[name].view(-1)[[3, 4000, -1]] += torch.tensor([0.5, -2.0, 0.25], dtype=torch.bfloat16)
        edited["after"] = tensors[name]

    (change,) = compare_tensors(*pair(tmp_path, edit)).changed
    distance = (edited["after"].double() - edited["before"].double()).abs()
    assert (change.name, change.changed, change.elements) == (name, 3, edited["before"].numel())
    assert change.largest == float(distance.max())
    assert change.before == change.after == f"BF16{list(edited['before'].shape)}"


def test_added_removed_retyped_and_reshaped(tmp_path: Path) -> None:
    def edit(tensors: fixtures.Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["extra"] = torch.ones(3)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].float()
        tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
        tensors["model.layers.0.input_layernorm.weight"] = torch.ones(7, dtype=torch.bfloat16)

    a, b = pair(tmp_path, edit)
    found = compare_tensors(a, b)
    assert (found.added, found.removed) == (["extra"], ["model.norm.weight"])
    assert [(c.name, c.after, c.changed) for c in found.reshaped] == [
        ("model.layers.0.input_layernorm.weight", "BF16[7]", None)
    ]
    retyped = {change.name: change for change in found.retyped}
    widened, narrowed = retyped["model.embed_tokens.weight"], retyped["lm_head.weight"]
    assert (widened.changed, widened.largest) == (0, 0.0)
    one, other = (folder.read("lm_head.weight").to_torch().double() for folder in (a, b))
    assert (narrowed.changed, narrowed.largest) == (int((one != other).sum()), float((one - other).abs().max()))
    assert found.same == len(a.tensors) - 4


def test_nan_on_one_side_has_no_distance(tmp_path: Path) -> None:
    def edit(tensors: fixtures.Tensors) -> None:
        tensors["lm_head.weight"][0, 0] = math.nan

    (change,) = compare_tensors(*pair(tmp_path, edit)).changed
    assert (change.changed, change.largest) == (1, None)


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2", "BF16", "F16"])
def test_types_are_decoded_as_torch_does(name: str) -> None:
    dtype = getattr(torch, difference.DTYPES[name][1])
    bits = torch.arange(256 if dtype.itemsize == 1 else 65536, dtype=torch.int32)
    raw = bits.to(torch.uint8) if dtype.itemsize == 1 else bits.to(torch.int16)
    expected = raw.view(dtype).float()
    ours = torch.from_numpy(difference._decode(raw.view(torch.uint8).numpy(), name)).float()
    assert torch.equal(torch.isnan(ours), torch.isnan(expected))
    assert torch.equal(torch.nan_to_num(ours), torch.nan_to_num(expected))


def test_int4_is_compared_in_steps() -> None:
    from pipeline.quantization.int4 import pack

    q = torch.randint(-8, 8, (6, 4), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    packed = pack(q).reshape(-1).view(torch.uint8).numpy()
    unpacked = torch.from_numpy(difference._unpack(packed, "I8")).reshape(3, 4, 2)  # byte (r, c): rows 2r and 2r+1
    assert torch.equal(unpacked.permute(0, 2, 1).reshape(6, 4), q.float())
    other = q.clone()
    other[0, 0] = -8 if q[0, 0] >= 0 else 7
    moved = pack(other).reshape(-1).view(torch.uint8).numpy()
    count, distance = difference._measure(packed, moved, "I8", "I8", difference._unpack)
    assert (count, distance) == (1, abs(float(other[0, 0]) - float(q[0, 0])))


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    import tracemalloc

    def size_of(rows: int) -> int:
        folders = []
        for name, shift in (("a", 0.0), ("b", 1.0)):

            def edit(tensors: fixtures.Tensors, shift: float = shift) -> None:
                tensors["big"] = torch.full((rows, 1 << 20), shift, dtype=torch.float16)

            path = fixtures.llama(tmp_path / f"{name}{rows}", num_hidden_layers=1, edit=edit)
            folders.append(CheckpointFolder.open(path))
        tracemalloc.start()
        (change,) = compare_tensors(*folders).changed
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (change.changed, change.largest) == (rows << 20, 1.0)
        return peak

    assert size_of(8) < size_of(2) * 1.1
