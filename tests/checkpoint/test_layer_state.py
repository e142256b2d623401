"""Experts that are read when their tokens come give transformers' own output bit for bit, and are not held."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint import reference
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.hub_weights import hf_layer_state
from pipeline.checkpoint.layer_state import EXPERTS
from pipeline.checkpoint.reference import build_hf_layer, build_hf_rotary, causal_mask
from pipeline.errors import CheckpointError
from pipeline.workspace import FolderWorkspace
from tests import fixtures

LAYER, TOKENS = 1, 40
CASES = [(fixtures.deepseek_v2, {}), (fixtures.deepseek_v3, {}), (fixtures.deepseek_v3, {"fp8": True})]


def convert(write: Any, options: dict[str, Any], folder: Path) -> CheckpointFolder:
    source = CheckpointFolder.open(write(folder / "source", **options))
    convert_checkpoint(source, FolderWorkspace(folder / "engine"), dtype=None, overflow="refuse")
    return CheckpointFolder.open(folder / "engine")


def run(engine: CheckpointFolder, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    module = build_hf_layer(engine.config, LAYER, state, torch.float32)
    hidden = torch.randn(2, TOKENS, engine.architecture.hidden_size, generator=torch.Generator().manual_seed(1))
    embeddings = build_hf_rotary(engine.config)(hidden, torch.arange(TOKENS)[None].expand(2, -1))
    with torch.no_grad():
        output: torch.Tensor = module(
            hidden, attention_mask=causal_mask(TOKENS, hidden.dtype), position_embeddings=embeddings
        )
    return output


class Watched(Mapping[str, torch.Tensor]):
    """Counts how often each weight is read, and the most that were alive at once of experts' weights."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.state, self.reads, self.alive, self.most = state, Counter[str](), 0, 0

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self.state[name]
        if not name.startswith(EXPERTS):
            return weight
        self.reads[name] += 1
        made = weight.clone()
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(made, self.end)
        return made

    def end(self) -> None:
        self.alive -= 1

    def __contains__(self, name: object) -> bool:
        return name in self.state

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


@pytest.mark.parametrize(("write", "options"), CASES)
def test_bit_for_bit_and_one_at_a_time(
    write: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = convert(write, options, tmp_path)
    whole = dict(hf_layer_state(engine, engine.architecture, LAYER))  # every expert at once
    expected = run(engine, whole)
    monkeypatch.setattr(reference, "HELD_EXPERTS", 0)
    watched = Watched(hf_layer_state(engine, engine.architecture, LAYER))
    assert torch.equal(run(engine, watched), expected)
    gc.collect()
    assert watched.reads
    assert set(watched.reads.values()) == {1}
    assert watched.alive == 0
    assert watched.most <= 2  # a weight, and the one that is just being let go of
    assert watched.state.keys() == whole.keys()


def test_gradients_go_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = convert(fixtures.deepseek_v2, {}, tmp_path)
    hidden = torch.randn(1, TOKENS, engine.architecture.hidden_size, generator=torch.Generator().manual_seed(2))
    gradients = []
    for held in (reference.HELD_EXPERTS, 0):
        monkeypatch.setattr(reference, "HELD_EXPERTS", held)
        state = hf_layer_state(engine, engine.architecture, LAYER)
        module = build_hf_layer(engine.config, LAYER, state, torch.float32)
        embeddings = build_hf_rotary(engine.config)(hidden, torch.arange(TOKENS)[None])
        leaf = hidden.clone().requires_grad_(True)
        output = module(leaf, attention_mask=causal_mask(TOKENS, leaf.dtype), position_embeddings=embeddings)
        gradients.append(torch.autograd.grad(output.sum(), leaf)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("held", [0, reference.HELD_EXPERTS])
def test_a_missing_or_misshapen_expert(held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "HELD_EXPERTS", held)
    engine = convert(fixtures.deepseek_v2, {}, tmp_path)
    state = dict(hf_layer_state(engine, engine.architecture, LAYER))
    name = "mlp.experts.2.up_proj.weight"
    with pytest.raises(CheckpointError, match=rf"{name} has shape"):
        run(engine, {**state, name: state[name].T})
    with pytest.raises(CheckpointError, match=r"mlp.experts.99.up_proj.weight has shape"):
        run(engine, {**state, "mlp.experts.99.up_proj.weight": state[name]})
    del state[name]
    with pytest.raises(CheckpointError, match=rf"{name} is missing"):
        run(engine, state)
