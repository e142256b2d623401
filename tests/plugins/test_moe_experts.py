"""The experts' kernels against their reference: ragged, empty, all in one, of a range of experts; the reference against
transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from plugins.compiler import SMS, compile_kernel
from plugins.moe_experts.operation import PAIRS_AT_ONCE, MoeExperts
from plugins.moe_experts.products import FEW_ROWS, MANY_ROWS, MOST_TILES
from plugins.simulator import Simulator
from tests.plugins.experts_cases import BASE, STORAGES, make_inputs
from tests.plugins.steps import EXAMPLES, LAYOUTS, lay_out

# Largest difference, relative to the largest output: the order of sums, and a rounding of the parts.
BOUNDS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
# What rows choose: any experts, none that are here, no expert at all.
CHOICES = ("any", "any", "elsewhere", "nobody")


def choose(op: MoeExperts, rows: int, choice: str) -> torch.Tensor | None:
    """indices [rows, k]; None for any."""
    elsewhere = [expert for expert in range(op.experts) if not op.first <= expert < op.first + op.count]
    if choice == "any" or (choice == "elsewhere" and len(elsewhere) < op.top_k):
        return None
    chosen = elsewhere[: op.top_k] if choice == "elsewhere" else [-1] * op.top_k
    return torch.tensor(chosen, dtype=torch.int32).expand(rows, -1).contiguous()


def check(
    simulator: Simulator, op: MoeExperts, inputs: list[torch.Tensor], sm: int = 90, layout: str = "dense"
) -> torch.Tensor:
    (found,), (wanted,) = simulator.run(op, inputs, sm), op.compute(*(lay_out(tensor, layout) for tensor in inputs))
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype) == ((len(inputs[0]), op.hidden), torch.float32)
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, wanted, rtol=0, atol=BOUNDS[op.dtype] * max(largest, 1e-3))
    return found


@EXAMPLES
@given(
    rows=st.integers(0, 12),
    dtype=st.sampled_from(list(BOUNDS)),
    storages=st.tuples(st.sampled_from(list(STORAGES)), st.sampled_from(list(STORAGES))),
    sizes=st.sampled_from([(64, 32), (96, 160), (160, 96)]),
    experts=st.sampled_from([(1, 1), (5, 2), (9, 3)]),
    share=st.sampled_from([(0.0, 1.0), (0.0, 1.0), (0.3, 0.5)]),
    prescale=st.sampled_from(["", "shared", "each"]),
    sm=st.sampled_from([80, 90]),
    seed=st.integers(0, 3),
    choice=st.sampled_from(CHOICES),
    layout=LAYOUTS,
)
def test_rows_get_their_experts_sum(
    simulator: Simulator,
    rows: int,
    dtype: str,
    storages: tuple[str, str],
    sizes: tuple[int, int],
    experts: tuple[int, int],
    share: tuple[float, float],
    prescale: str,
    sm: int,
    seed: int,
    choice: str,
    layout: str,
) -> None:
    up = {name: value for name, value in STORAGES[storages[0]].items() if name.startswith("up")}
    down = {name: value for name, value in STORAGES[storages[1]].items() if name.startswith("down")}
    first = int(share[0] * experts[0])
    op = replace(
        BASE, dtype=dtype, hidden=sizes[0], width=sizes[1], experts=experts[0], first=first,
        count=max(1, int(share[1] * experts[0])), top_k=experts[1], prescale=prescale, **up, **down,
    )  # fmt: skip
    found = check(simulator, op, make_inputs(op, rows, choose(op, rows, choice), seed), sm, layout)
    assert choice != "nobody" or not found.any()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("storage", STORAGES)
def test_every_type_of_rows_and_experts(simulator: Simulator, storage: str, dtype: str) -> None:
    op = replace(BASE, dtype=dtype, **STORAGES[storage])
    check(simulator, op, make_inputs(op, 5, None, 1))


@pytest.mark.parametrize("storage", STORAGES)
def test_one_expert_may_take_all(simulator: Simulator, storage: str) -> None:
    """More rows than its programs have tiles for, and experts that nobody chose beside it."""
    op = replace(BASE, dtype="float16", top_k=1, **STORAGES[storage])
    rows = MANY_ROWS * MOST_TILES + 9
    inputs = make_inputs(op, rows, torch.full((rows, 1), 3, dtype=torch.int32))
    assert op.launches([tuple(tensor.shape) for tensor in inputs])[1].grid[1:] == (op.count, MOST_TILES)
    check(simulator, op, inputs)


def test_pairs_that_are_nobodys_add_nothing(simulator: Simulator) -> None:
    op = replace(BASE, first=2, count=2)
    chosen = torch.tensor([[0, 1], [-1, 6], [2, 5], [3, 2], [1 << 30, 3]], dtype=torch.int32)
    inputs = make_inputs(op, len(chosen), chosen)
    found = check(simulator, op, inputs)
    assert not found[:2].any() and bool(found[2:].any(1).all())


@pytest.mark.parametrize("storage", STORAGES)
def test_ranks_add_up_to_the_whole(simulator: Simulator, storage: str) -> None:
    whole = replace(BASE, **STORAGES[storage])
    inputs = make_inputs(whole, 12)
    total = torch.zeros(12, whole.hidden)
    for first in range(0, whole.experts, 2):
        part = replace(whole, first=first, count=2)
        own = inputs[:3] + [tensor[first : first + 2].contiguous() for tensor in inputs[3:]]
        total += check(simulator, part, own)
    torch.testing.assert_close(total, whole.compute(*inputs)[0], rtol=1e-5, atol=1e-5)


def test_many_pairs_are_grouped_in_several_turns(simulator: Simulator) -> None:
    op = replace(BASE, hidden=32, top_k=6, dtype="float16")
    rows = PAIRS_AT_ONCE // 6 + 20
    skewed = torch.rand(rows, 6, generator=torch.Generator().manual_seed(2)) * torch.tensor([9, 5, 3, 1, 1, 0.5])
    inputs = make_inputs(op, rows, skewed.argsort(1, descending=True).to(torch.int32))
    check(simulator, op, inputs)


def test_the_same_rows_give_the_same_bits(simulator: Simulator) -> None:
    """In the kernels among any others: every sum is of one row, in one order. In the reference too."""
    op = replace(BASE, **STORAGES["int4"])
    inputs = make_inputs(op, 11)
    few = [tensor[4:7].contiguous() for tensor in inputs[:3]] + inputs[3:]
    assert torch.equal(simulator.run(op, few)[0], simulator.run(op, inputs)[0][4:7])
    assert torch.equal(op.compute(*few)[0], op.compute(*inputs)[0][4:7])


def test_an_empty_step_starts_nothing(simulator: Simulator) -> None:
    inputs = make_inputs(BASE, 0)
    assert BASE.launches([tuple(tensor.shape) for tensor in inputs]) == ()
    assert check(simulator, BASE, inputs).shape == (0, BASE.hidden)


def test_tiles_follow_the_rows_of_an_expert() -> None:
    def tile(rows: int) -> int:
        launches = BASE.launches([(rows, BASE.hidden), (rows, BASE.top_k)])
        assert [launch.kernel.function for launch in launches] == ["group_pairs", "multiply", "multiply", "combine"]
        return int(dict(launches[1].kernel.constants)["ROWS"])

    most = FEW_ROWS * BASE.experts // BASE.top_k
    assert (tile(1), tile(most), tile(most + 1)) == (FEW_ROWS, FEW_ROWS, MANY_ROWS)


@pytest.mark.parametrize("first", ["fp8", "fp8_blocks"])
def test_every_fp8_number_is_widened_and_rounded_to(simulator: Simulator, first: str) -> None:
    """All finite bytes as weights; as inputs, numbers and the middles between them, where ties go to even."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes[:127].float()
    middles = torch.cat([numbers, -(numbers[1:] + numbers[:-1]) / 2, torch.tensor([460.0, -1e4])])
    op = replace(BASE, hidden=256, top_k=1, experts=1, count=1, **{**STORAGES[first], "down_storage": "plain"})
    op = replace(op, up_step=op.up_step and 1.0, down_step=0.0)
    inputs = make_inputs(op, len(middles), torch.zeros(len(middles), 1, dtype=torch.int32))
    stored = codes.float().nan_to_num(0.0).to(torch.float8_e4m3fn).view(torch.int8)
    for name in ("fc", "gate"):
        weight = inputs[op.input_names().index(name)]
        weight[:] = stored[torch.randperm(256, generator=torch.Generator().manual_seed(4))]
    inputs[0] = torch.zeros(len(middles), 256)
    inputs[0][torch.arange(len(middles)), torch.arange(len(middles)) % 256] = middles
    for sm in (80, 90):
        check(simulator, op, inputs, sm)


def test_the_reference_is_transformers_experts() -> None:
    op = replace(BASE, hidden=48, width=24, experts=7, count=7, top_k=3)
    config = DeepseekV3Config(
        hidden_size=48, moe_intermediate_size=24, n_routed_experts=7, num_local_experts=7, num_experts_per_tok=3,
        hidden_act="silu",
    )  # fmt: skip
    experts = DeepseekV3Experts(config)
    inputs = make_inputs(op, 9)
    x, weights, indices, fc, gate, proj = inputs
    with torch.no_grad():
        experts.gate_up_proj.copy_(torch.cat([fc, gate], 1))
        experts.down_proj.copy_(proj)
        wanted = experts(x, indices.long(), weights)
    torch.testing.assert_close(op.compute(*inputs)[0], wanted, rtol=1e-5, atol=1e-5)


def test_what_fp8_rounds_is_what_torch_rounds() -> None:
    """The reference of FP8, written again: inputs and products in steps."""
    op = replace(BASE, **STORAGES["fp8"], top_k=1, experts=1, count=1)
    inputs = make_inputs(op, 5)
    x, weights, _, fc, gate, proj, *scales = inputs

    def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, step: float) -> torch.Tensor:
        rounded = (x / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
        return F.linear(rounded, weight[0].view(torch.float8_e4m3fn).float() * scale[0])

    gated = F.silu(linear(x, fc, scales[0], op.up_step)) * linear(x, gate, scales[1], op.up_step)
    torch.testing.assert_close(op.compute(*inputs)[0], linear(gated, proj, scales[2], op.down_step) * weights)
    assert not torch.equal(op.compute(*inputs)[0], op.without_rounding().compute(*inputs)[0])


@pytest.mark.parametrize(
    ("storage", "sm"),
    [
        pytest.param(storage, sm, marks=() if storage == "int4" or sm == 80 else pytest.mark.slow)
        for storage in STORAGES
        for sm in SMS
    ],
)
def test_kernels_compile_and_keep_to_registers(storage: str, sm: int) -> None:
    """At the sizes of V2-Lite, on SM80 also where weights are FP8."""
    sizes = {"hidden": 2048, "width": 1408, "experts": 64, "count": 64, "top_k": 6, "dtype": "float16"}
    wide = {name: 128 if name.endswith("group") else value for name, value in STORAGES[storage].items()}
    for kernel in replace(BASE, **sizes, **wide).kernels():  # type: ignore[arg-type]
        made = compile_kernel(kernel, sm)
        assert made.spills == 0
        assert made.shared <= 99 << 10


def test_the_workspace_holds_every_pair_of_every_place() -> None:
    op = replace(BASE, dtype="float16", top_k=3)
    nbytes = op.scratch_bytes([tuple(tensor.shape) for tensor in make_inputs(op, 7)])
    assert nbytes >= 4 * 7 + 4 * 21 + 21 * 2 * (op.width + op.hidden)
    assert op.scratch_bytes([(0, op.hidden)]) <= 256
