"""Captured inputs against what one pass over all tokens at once, written out, gives."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.checkpoint.reference import build_hf_layer, build_hf_rotary, causal_mask
from pipeline.quantization import capture
from pipeline.quantization.capture import Capture, Captured, Sampler, draw_priorities
from pipeline.quantization.hidden_states import HiddenStates
from tests.quantization.support import Model

SAMPLES, LENGTH = 12, 16


def test_sample_does_not_depend_on_batches() -> None:
    x, priorities = torch.randn(1000, 8), draw_priorities(1000, seed=3)
    whole, parts = Sampler(priorities, limit=50), Sampler(priorities, limit=50)
    whole.add(x, torch.arange(1000))
    for start in (0, 1, 40, 700):
        stop = {0: 1, 1: 40, 40: 700, 700: 1000}[start]
        parts.add(x[start:stop], torch.arange(start, stop))
    a, b = whole.finish(), parts.finish()
    assert torch.equal(a.rows, b.rows) and torch.equal(a.mean_abs, b.mean_abs) and a.tokens == b.tokens == 1000
    assert torch.equal(a.rows, x[priorities.argsort()[:50]])
    torch.testing.assert_close(a.mean_abs, x.abs().mean(0), rtol=2**-8, atol=0)
    other = Sampler(draw_priorities(1000, seed=4), limit=50)
    other.add(x, torch.arange(1000))
    assert not torch.equal(other.finish().rows, a.rows)


def test_no_tokens() -> None:
    assert Sampler(draw_priorities(4, seed=0)).finish().tokens == 0


def run(model: Model, names: list[str], batch: int) -> tuple[Captured, torch.Tensor, torch.nn.Module]:
    state = {}
    from pipeline.checkpoint.layouts import layout_for

    for mapping in layout_for(model.architecture).mappings():
        if mapping.layer == 1:
            parts = mapping.backward(model.source.values[mapping.target])
            state |= {n.removeprefix("model.layers.1."): p for n, p in zip(mapping.sources, parts, strict=True)}
    module = build_hf_layer(model.config, 1, state, torch.float32)
    hidden = torch.randn(SAMPLES, LENGTH, 128, generator=torch.Generator().manual_seed(2))
    watcher = Capture(names, draw_priorities(SAMPLES * LENGTH, seed=0), num_experts=16)
    with watcher.watching(module):
        for start in range(0, SAMPLES, batch):
            watcher.start_batch(start * LENGTH)
            x = hidden[start : start + batch]
            embeddings = build_hf_rotary(model.config)(x, torch.arange(LENGTH)[None].expand(x.shape[0], -1))
            module(x, attention_mask=causal_mask(LENGTH, torch.float32), position_embeddings=embeddings)
    return watcher.finish(), hidden, module


def test_experts_get_the_tokens_that_the_router_chose(deepseek_v2_path: Path) -> None:
    model = Model.load(deepseek_v2_path)
    captured, _, module = run(model, ["mlp.experts", "self_attn.o_proj"], batch=5)
    assert sum(inputs.tokens for inputs in captured.experts) == SAMPLES * LENGTH * 4  # top_k = 4
    everything = captured.inputs["mlp.experts"]
    assert everything.rows.shape == (SAMPLES * LENGTH, 128)  # fewer than the limit: all of them
    _, _, chosen = module.mlp.gate(everything.rows)  # type: ignore[union-attr,operator]
    for expert, inputs in enumerate(captured.experts):
        expected = everything.rows[(chosen == expert).any(1)]
        assert inputs.tokens == expected.shape[0]
        torch.testing.assert_close(inputs.rows, expected)
        if inputs.tokens:
            torch.testing.assert_close(inputs.mean_abs, expected.abs().mean(0), rtol=2**-8, atol=0)
    assert captured.inputs["self_attn.o_proj"].rows.shape == (SAMPLES * LENGTH, 4 * 32)


def test_hooks_are_removed(deepseek_v2_path: Path) -> None:
    _, _, module = run(Model.load(deepseek_v2_path), ["mlp.experts"], batch=12)
    assert not module.get_submodule("mlp.experts")._forward_pre_hooks


def test_rows_of_many_experts_are_bounded() -> None:
    assert Capture(["mlp.experts"], draw_priorities(8, 0), 256).experts[0].limit == 64
    assert Capture(["mlp.experts"], draw_priorities(8, 0), 16).experts[0].limit == capture.ROWS
    assert not Capture(["mlp.down_proj"], draw_priorities(8, 0), 16).experts


def test_states_on_disk_are_read_back_in_batches(tmp_path: Path) -> None:
    states = HiddenStates(tmp_path / "s", samples=150, length=32, hidden=8)
    values = torch.randn(150, 32, 8)
    assert [stop - start for start, stop in states.spans()] == [8] * 18 + [6]
    wide = HiddenStates(tmp_path / "w", samples=150, length=32, hidden=1024)
    assert [stop - start for start, stop in wide.spans()] == [32] * 4 + [22]
    assert HiddenStates(tmp_path / "w", samples=3, length=4096, hidden=8).spans() == [(0, 1), (1, 2), (2, 3)]
    states.write(values[start:stop] for start, stop in states.spans())
    assert states.path.stat().st_size == states.nbytes == values.nbytes
    assert torch.equal(torch.cat(list(states.batches())), values)
