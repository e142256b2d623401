"""Second moments as calibration hands them on: shared ones, and each expert's from the tokens that it was sent."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.reference import build_hf_layer, build_hf_rotary, causal_mask
from pipeline.quantization.capture import EXPERTS, Capture, Captured, draw_priorities
from pipeline.quantization.layer import group_linears, read_float
from pipeline.quantization.linear_inputs import LinearInputs
from pipeline.quantization.moments import CHUNK, ExpertInputs
from pipeline.quantization.rules import choose_linears
from pipeline.quantization.selection import QUANTIZABLE, Rules
from tests.quantization.support import Model

SAMPLES, LENGTH, LAYER = 8, 16, 1  # 32 tokens per expert on average: some have fewer
PREFIX = f"transformer.layers.{LAYER}."


def capture(model: Model, spill: Path, batch: int = 5) -> tuple[Captured, torch.nn.Module]:
    from pipeline.checkpoint.layouts import layout_for

    state: dict[str, torch.Tensor] = {}
    for mapping in layout_for(model.architecture).mappings():
        if mapping.layer == LAYER:
            parts = mapping.backward(model.source.values[mapping.target])
            state |= {n.removeprefix(f"model.layers.{LAYER}."): p for n, p in zip(mapping.sources, parts, strict=True)}
    module = build_hf_layer(model.config, LAYER, state, torch.float32)
    hidden = torch.randn(SAMPLES, LENGTH, 128, generator=torch.Generator().manual_seed(2))
    names = ["self_attn.o_proj", EXPERTS]
    watcher = Capture(names, draw_priorities(SAMPLES * LENGTH, seed=0), 16, names, spill)
    with watcher.watching(module):
        for start in range(0, SAMPLES, batch):
            watcher.start_batch(start * LENGTH)
            x = hidden[start : start + batch]
            embeddings = build_hf_rotary(model.config)(x, torch.arange(LENGTH)[None].expand(x.shape[0], -1))
            module(x, attention_mask=causal_mask(LENGTH, torch.float32), position_embeddings=embeddings)
    return watcher.finish(), module


def moments(model: Model, captured: Captured, unrouted: str = "round_to_nearest") -> dict[str, torch.Tensor]:
    """All second moments of the layer, by linear; each is made when it is asked for."""
    rules = Rules(
        method="gptq",
        include=tuple(role for role in QUANTIZABLE if role not in ("attention_input", "head")),
        group_size=32,
    )
    from pipeline.checkpoint.layouts import layout_for

    mappings = layout_for(model.architecture).mappings()
    linears = {
        name: linear
        for name, linear in choose_linears(mappings, model.source.tensors, rules).linears.items()
        if linear.layer == LAYER and not linear.name.startswith(f"{PREFIX}mlp.shared")
    }
    present = {name.removesuffix(".weight") for name in model.source.tensors if name.startswith(PREFIX)}
    seen = LinearInputs(captured, partial(read_float, model.source), unrouted)
    found: dict[str, torch.Tensor] = {}
    for _, group in group_linears(model.architecture, LAYER, present, linears):
        members = [linears[name] for name in group.linears]
        found |= {name: moment.make() for name, moment in seen.moments(group, members).items()}
    return found


def moment_of(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / len(x)


def test_experts_have_those_of_the_tokens_that_they_were_sent(deepseek_v2_path: Path, tmp_path: Path) -> None:
    model = Model.load(deepseek_v2_path)
    captured, module = capture(model, tmp_path / "spill" / "x")
    found = moments(model, captured)
    everything = captured.inputs[EXPERTS].rows  # in another order
    _, _, chosen = module.mlp.gate(everything)  # type: ignore[union-attr,operator]
    fed = [expert for expert, inputs in enumerate(captured.experts) if inputs.tokens >= 32]
    assert 2 < len(fed) < 16
    assert found.keys() == {
        f"{PREFIX}attention.dense",
        *(f"{PREFIX}mlp.experts.{expert}.{part}" for expert in fed for part in ("fc", "gate", "proj")),
    }
    for expert in fed:
        x = everything[(chosen == expert).any(1)]
        name = f"{PREFIX}mlp.experts.{expert}"
        torch.testing.assert_close(found[f"{name}.fc"], moment_of(x))
        torch.testing.assert_close(found[f"{name}.gate"], moment_of(x))
        fc, gate = (model.source.values[f"{name}.{part}.weight"].float() for part in ("fc", "gate"))
        hidden = torch.nn.functional.silu(x @ fc.T) * (x @ gate.T)
        torch.testing.assert_close(found[f"{name}.proj"], moment_of(hidden))


def test_shared_inputs_have_one(deepseek_v2_path: Path, tmp_path: Path) -> None:
    model = Model.load(deepseek_v2_path)
    captured, _ = capture(model, tmp_path / "x")
    rows = captured.inputs["self_attn.o_proj"].rows
    torch.testing.assert_close(moments(model, captured)[f"{PREFIX}attention.dense"], moment_of(rows))
    assert EXPERTS not in captured.moments


def test_starved_experts_follow_the_policy(deepseek_v2_path: Path, tmp_path: Path) -> None:
    model = Model.load(deepseek_v2_path)
    captured, _ = capture(model, tmp_path / "x")
    starved = next(expert for expert, inputs in enumerate(captured.experts) if inputs.tokens < 32)
    name = f"{PREFIX}mlp.experts.{starved}.fc"
    assert name not in moments(model, captured)
    shared = moments(model, captured, "share_scale")
    torch.testing.assert_close(shared[name], moment_of(captured.inputs[EXPERTS].rows))


def test_a_file_of_more_than_a_chunk(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * CHUNK + 5, 8, generator=generator)
    chosen = torch.randint(0, 3, (len(x), 2), generator=generator)
    inputs = ExpertInputs(tmp_path / "deeper" / "x")
    for part, routed in zip(torch.split(x, 1000), torch.split(chosen, 1000), strict=True):
        inputs.add(part, routed)
    inputs.close()
    assert torch.equal(torch.cat(list(inputs.rows(1))), x[(chosen == 1).any(1)])
    assert torch.equal(torch.cat(list(inputs.rows(None))), x)
    assert not list(inputs.rows(7)) or not len(next(inputs.rows(7)))
    assert all(len(rows) <= CHUNK for rows in inputs.rows(None))


@pytest.mark.parametrize("names", [[], ["self_attn.o_proj"]])
def test_nothing_is_kept_that_nobody_asked_for(deepseek_v2_path: Path, tmp_path: Path, names: list[str]) -> None:
    watcher = Capture(["self_attn.o_proj", EXPERTS], draw_priorities(8, 0), 16, names, tmp_path / "x")
    assert watcher.moments.keys() == set(names) and watcher.expert_inputs is None
