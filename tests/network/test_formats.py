"""FP8, INT8 and SmoothQuant linears, alone and mixed in one model, on every architecture, experts stacked.

Without the rounding of inputs the network gives the logits of transformers on the dequantized weights; and each
rounding is, value by value, torch's own cast. The two together are the network as declared: compared whole, a value
beside the middle between two steps would fall to one side here and to the other there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.interpreter.interpreter import Interpreter
from pipeline.network.program import Program
from pipeline.network.widening import widen_inputs
from pipeline.runtime.steps import Chunk, plan_step
from tests import fixtures
from tests.network import formats, models
from tests.network.serving import prompts, reference_logits, serve

TOLERANCE = 1e-5
ALL = r"layers.*_proj\.weight"
LATENT = r"mlp.*_proj\.weight|o_proj|q_a_proj|q_b_proj|q_proj"
MIXED = {"q_proj|k_proj|v_proj": "fp8", "o_proj": "int4", "gate_proj|up_proj": "int8_sq", "down_proj": "int8"}
MIXED_ROUTED = {"o_proj|q_a_proj": "fp8", r"experts.*gate_proj": "fp8", r"experts.*up_proj": "int4",
                r"experts.*down_proj": "int8_sq", r"mlp.*_proj": "int8"}  # fmt: skip
Write = Callable[..., Path]
CASES: dict[str, tuple[Write, dict[str, str], dict[str, object]]] = {
    **{f"llama-{kind}": (fixtures.llama, {ALL: kind}, {"mlp_bias": True}) for kind in ("fp8", "int8", "int8_sq")},
    "qwen2-fp8_rows": (fixtures.qwen2, {ALL: "fp8_rows"}, {"dtype": "float16"}),
    "moe-fp8_rows": (fixtures.deepseek_moe, {ALL: "fp8_rows"}, {}),
    "moe-fp8_wide_inputs": (fixtures.deepseek_moe, {ALL: "fp8_wide_inputs"}, {"num_hidden_layers": 2}),
    "qwen2-fp8": (fixtures.qwen2, {ALL: "fp8"}, {"dtype": "float16"}),
    "qwen2-int8_sq": (fixtures.qwen2, {ALL: "int8_sq"}, {"dtype": "float16"}),
    "v2-fp8": (fixtures.deepseek_v2, {LATENT: "fp8"}, {"dtype": "float16"}),
    "v2-int8": (fixtures.deepseek_v2, {LATENT: "int8"}, {}),
    "v2-int8_sq": (fixtures.deepseek_v2, {LATENT: "int8_sq"}, {"dtype": "float16"}),
    "v3-fp8": (fixtures.deepseek_v3, {LATENT: "fp8"}, {}),
    "v3-int8_sq": (fixtures.deepseek_v3, {LATENT: "int8_sq"}, {}),
    "llama-mixed": (fixtures.llama, MIXED, {}),
    "llama-head": (fixtures.llama, {"lm_head": "int8"}, {"dtype": "float16", "num_hidden_layers": 1}),
    "v2-head": (fixtures.deepseek_v2, {LATENT: "int8", "lm_head": "int4"}, {"num_hidden_layers": 1}),
    "v3-mixed": (fixtures.deepseek_v3, MIXED_ROUTED, {"num_hidden_layers": 2}),
}


def _load(name: str, path: Path) -> models.Model:
    write, kinds, options = CASES[name]
    return formats.load(write, path, kinds, **options)


@pytest.mark.parametrize(
    ("name", "moe"),
    [
        *((name, "dense") for name in CASES),
        ("v2-int8_sq", "gather"),
        ("v3-fp8", "gather"),
        ("moe-fp8_rows", "gather"),
        ("v3-mixed", "gather"),
    ],
)
def test_dequantized_weights_give_the_logits_of_transformers(name: str, moe: str, tmp_path: Path) -> None:
    model = _load(name, tmp_path / "hf")
    reference, sequences = model.reference(), prompts(model.architecture.vocab_size)
    program = widen_inputs(model.program(moe=moe))
    assert not [node for node in program.nodes if node.kind == "quantize"]
    for found, sequence in zip(serve(program, sequences=sequences), sequences, strict=True):
        expected = reference_logits(reference, sequence)
        assert (found["logits"] - expected).abs().max() < TOLERANCE
        assert expected.std() > 0.5


def _round(x: torch.Tensor, step: float, kind: str) -> torch.Tensor:
    if kind == "fp8":
        return (x / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
    return (x / step).round().clamp(-128, 127) * step


@pytest.mark.parametrize(
    ("name", "moe", "count"),
    [
        ("llama-fp8", "dense", 3 * 5),
        ("llama-int8_sq", "dense", 3 * 5),
        ("qwen2-fp8_rows", "dense", 3 * 5),
        ("moe-fp8_wide_inputs", "dense", 0),
        ("v2-fp8", "gather", 3 * 3 + 3 + 2 * 6),
        ("v3-int8_sq", "dense", 3 * 3 + 3 + 2 * 6),
        ("v3-mixed", "dense", 2 * 2 + 2 + 2),
        ("llama-int8", "dense", 0),
    ],
)
def test_inputs_are_rounded_as_torch_casts(name: str, moe: str, count: int, tmp_path: Path) -> None:
    model = _load(name, tmp_path / "hf")
    program = model.program(moe=moe)
    rounded = _find_rounded(program)
    assert len(rounded) == count
    taps = [tap for pair in rounded for tap in pair[:2]]
    (sequence, *_) = prompts(model.architecture.vocab_size)
    plan = plan_step(
        [Chunk(tokens=sequence[:24], start=0, block_table=range(1, 4), logits="all")], block_size=8, num_blocks=4
    )
    feeds = {key: torch.from_numpy(value) for key, value in plan.inputs.items()}
    pools = {s.name: torch.zeros(4, *s.shape[1:]) for s in program.inputs if "_pool_" in s.name}
    values = Interpreter(program, mode="exact").run({**feeds, **pools}, taps=taps)
    moved = 0
    for before, after, step, kind in rounded:
        assert torch.equal(values[after], _round(values[before], step, kind)), after
        moved += int((values[after] != values[before]).sum())
    assert moved or not count


def _find_rounded(program: Program) -> list[tuple[str, str, float, str]]:
    """(input, rounded input, step, type) of each rounding in the network."""
    back = {node.inputs[0]: node for node in program.nodes if node.kind == "dequantize"}
    found = []
    for node in program.nodes:
        if node.kind == "quantize":
            step = program.constants[str(node.inputs[1])].to_torch()
            assert step.shape == (1,) and back[node.outputs[0].name].inputs[1] == node.inputs[1]
            after = back[node.outputs[0].name].outputs[0].name
            found.append((str(node.inputs[0]), after, float(step), node.outputs[0].dtype))
    return found


def test_rounding_is_in_the_network_that_is_built(tmp_path: Path) -> None:
    """Coarse steps move the logits: the product reads what was rounded, not what was there before."""
    model = _load("llama-fp8", tmp_path / "hf")
    sequences = prompts(model.architecture.vocab_size)
    program = model.program()
    pairs = zip(serve(program, sequences=sequences), serve(widen_inputs(program), sequences=sequences), strict=True)
    assert all(1e-3 < (one["logits"] - other["logits"]).abs().max() < 1 for one, other in pairs)
