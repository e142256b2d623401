"""Dispatch and combine: kernels against the reference bit for bit, the reference against one rank with all experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import CompatibilityError
from plugins.moe_all_to_all.operation import MoeCombine, MoeDispatch
from plugins.moe_all_to_all.reference import combine, dispatch
from plugins.operation import Exchange, Result, resolve
from plugins.simulator import Simulator
from tests.plugins.experts_cases import BASE as EXPERTS
from tests.plugins.experts_cases import make_inputs
from tests.plugins.meeting import run_ranks
from tests.plugins.steps import EXAMPLES, LAYOUTS, lay_out

DISPATCH = MoeDispatch(dtype="float32", payload="model", first=0, ranks=2, experts=8, top_k=2, hidden=16)
COMBINE = MoeCombine(dtype="float32", first=0, ranks=2, experts=8, top_k=2, hidden=16)
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# How the tokens choose: any experts; all the same, and so mostly one rank; some nothing; ranks that none chooses.
CHOICES = ("any", "one", "padded", "last rank empty", "nobody")


@dataclass(frozen=True)
class Case:
    dispatch: MoeDispatch
    combine: MoeCombine
    rows: list[Rows]  # of each rank: x, ids, weights


def draw_case(dispatch: MoeDispatch, tokens: int, choice: str = "any", seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    op, rows = dispatch, []
    for _ in range(op.ranks):
        known = op.experts if choice != "last rank empty" or op.ranks == 1 else op.experts - op.experts // op.ranks
        scores = torch.rand(1 if choice == "one" else max(tokens, 1), op.experts, generator=generator)
        scores[:, known:] = -1
        ids = scores.topk(op.top_k, 1).indices.to(torch.int32).expand(tokens, -1)[:tokens].contiguous()
        ids[:, :] = torch.where(ids < known, ids, -1)
        if choice in ("padded", "nobody"):
            ids[tokens // 2 if choice == "padded" else 0 :] = -1
        x = torch.randn(tokens, op.hidden, generator=generator).to(getattr(torch, op.dtype))
        rows.append((x, ids, torch.rand(tokens, op.top_k, generator=generator)))
    common: dict[str, Any] = {k: v for k, v in dispatch.attributes().items() if k != "payload"}
    return Case(dispatch, MoeCombine(**common), rows)


def dispatch_all(case: Case) -> list[tuple[torch.Tensor, ...]]:
    return run_ranks(case.dispatch.ranks, lambda end: dispatch(case.dispatch, end, *case.rows[end.rank]))


def combine_all(case: Case, sent: list[tuple[torch.Tensor, ...]], rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return run_ranks(case.dispatch.ranks, lambda end: combine(case.combine, end, rows[end.rank], *sent[end.rank][3:]))


@st.composite
def cases(draw: Any, types: tuple[str, ...] = ("float32", "float16", "bfloat16")) -> Case:
    ranks, local = draw(st.sampled_from([(1, 4), (2, 2), (2, 5), (3, 1), (4, 2), (8, 1)]))
    op = MoeDispatch(
        dtype=draw(st.sampled_from(types)),
        payload=draw(st.sampled_from(["model", "fp8"])),
        first=0,
        ranks=ranks,
        experts=ranks * local,
        top_k=draw(st.integers(1, min(ranks * local, 6))),
        hidden=draw(st.sampled_from([4, 24, 40, 130])),
    )
    return draw_case(
        op, draw(st.integers(0, 1 + 12 // ranks)), draw(st.sampled_from(CHOICES)), draw(st.integers(0, 99))
    )


@EXAMPLES
@given(case=cases(), layout=LAYOUTS)
def test_kernels_send_what_the_reference_sends(simulator: Simulator, case: Case, layout: str) -> None:
    found = simulator.run_ranks(case.dispatch, case.rows)
    rows = [(lay_out(x, layout), lay_out(ids, layout), lay_out(weights, layout)) for x, ids, weights in case.rows]
    for own, wanted in zip(found, dispatch_all(replace(case, rows=rows)), strict=True):
        assert [(t.shape, t.dtype) for t in own] == [(t.shape, t.dtype) for t in wanted]
        came = int(wanted[4][1].sum())
        assert torch.equal(own[0][:came], wanted[0][:came])
        for a, b in zip(own[1:], wanted[1:], strict=True):
            assert torch.equal(a, b)


@EXAMPLES
@given(case=cases())
def test_kernels_sum_what_the_reference_sums(simulator: Simulator, case: Case) -> None:
    sent = dispatch_all(case)
    inputs = [(own[0] * 3, own[3], own[4]) for own in sent]
    wanted = combine_all(case, sent, [own[0] for own in inputs])
    for (found,), own in zip(simulator.run_ranks(case.combine, inputs), wanted, strict=True):
        assert torch.equal(found, own)


class Ranking(MoeDispatch):
    """Its first kernel alone: `places` are those within a rank."""

    def launches(self, shapes: Any) -> Any:
        ranked: Any = MoeDispatch.launches(self, shapes)[0]
        return (replace(ranked, arguments=(ranked.arguments[0], Result(3), *ranked.arguments[2:])),)


def test_more_tokens_than_a_tile_keep_their_order(simulator: Simulator) -> None:
    case = draw_case(replace(DISPATCH, hidden=4), 1100)
    ranking = Ranking(**DISPATCH.attributes())
    *_, places, counts = simulator.run(ranking, case.rows[0])
    *_, wanted, wanted_counts = dispatch_all(case)[0]
    assert torch.equal(counts[0], wanted_counts[0])
    first = torch.where(case.rows[0][1] < 4, 0, wanted_counts[0, 0])
    assert torch.equal(places, torch.where(wanted < 0, -1, wanted - first))


def test_fp8_is_encoded_and_decoded_as_torch_does(simulator: Simulator) -> None:
    """Every fp16 number that FP8 holds or rounds, with a scale of 1: halfway cases, subnormal numbers, both zeros."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    numbers = numbers[numbers.abs() <= 448]
    hidden = 2048
    op = replace(DISPATCH, dtype="float16", payload="fp8", ranks=1, experts=1, top_k=1, hidden=hidden)
    x = torch.full((-(-len(numbers) // (hidden - 1)), hidden), 448.0, dtype=torch.float16)
    filled = torch.zeros(len(x) * (hidden - 1), dtype=torch.float16)
    filled[: len(numbers)] = numbers
    x[:, 1:] = filled.view(len(x), -1)
    ids, weights = torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1)
    found = simulator.run(op, (x, ids, weights))[0]
    assert torch.equal(found.view(torch.int16), x.to(torch.float8_e4m3fn).to(torch.float16).view(torch.int16))


def run_experts(
    rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, matrices: torch.Tensor, own: range
) -> torch.Tensor:
    """What a rank does between dispatch and combine: the weighted sum of its own experts, of each row."""
    total = torch.zeros_like(rows)
    for expert in own:
        share = torch.where(ids == expert, weights, 0).sum(1, keepdim=True)
        total += share * (rows @ matrices[expert])
    return total


def run_layer(case: Case, matrices: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results of the ranks, each with its own experts, and of one that has all."""
    local = case.dispatch.experts // case.dispatch.ranks
    sent = dispatch_all(case)
    done = [
        run_experts(rows, ids, weights, matrices, range(rank * local, (rank + 1) * local))
        for rank, (rows, ids, weights, _, _) in enumerate(sent)
    ]
    whole = [run_experts(*rows, matrices, range(case.dispatch.experts)) for rows in case.rows]
    return combine_all(case, sent, done), whole


@EXAMPLES
@given(case=cases(types=("float32",)))
def test_several_ranks_are_one_rank(case: Case) -> None:
    """Small whole numbers: every sum is exact, whatever its order, so that not a bit may differ."""
    generator = torch.Generator().manual_seed(1)
    op = case.dispatch
    matrices = torch.randint(-2, 3, (op.experts, op.hidden, op.hidden), generator=generator).float()
    rows: list[Rows] = [
        (torch.randint(-4, 5, x.shape, generator=generator).float(), ids, (8 * weights).round() / 8)
        for x, ids, weights in case.rows
    ]
    found, wanted = run_layer(Case(replace(op, payload="model"), case.combine, rows), matrices)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("choice", ["any", "one"])
def test_kernels_of_a_whole_layer_are_one_rank(simulator: Simulator, choice: str) -> None:
    """Dispatch, moe_experts and combine, as engines run them. What dispatch leaves unwritten is huge here."""
    case = draw_case(replace(DISPATCH, ranks=2, experts=6, hidden=64), 4, choice)
    part = replace(EXPERTS, count=3)
    weights = make_inputs(EXPERTS, 1)[3:]
    sums, sent = [], simulator.run_ranks(case.dispatch, case.rows)
    for rank, (rows, ids, shares, _, _) in enumerate(sent):
        own = [stack[3 * rank : 3 * rank + 3] for stack in weights]
        sums.append(simulator.run(replace(part, first=3 * rank), [rows, shares, ids, *own])[0])
    returned = simulator.run_ranks(case.combine, [(s, own[3], own[4]) for s, own in zip(sums, sent, strict=True)])
    for (found,), (x, ids, shares) in zip(returned, case.rows, strict=True):
        torch.testing.assert_close(found, EXPERTS.compute(x, shares, ids, *weights)[0], rtol=1e-5, atol=1e-6)


def test_fp8_rows_are_within_the_stated_bound() -> None:
    case = draw_case(replace(DISPATCH, payload="fp8", ranks=4, hidden=512), 40)
    plain = dispatch_all(replace(case, dispatch=case.dispatch.without_rounding()))
    for number, (rows, _, _, _, counts) in enumerate(dispatch_all(case)):
        wide = plain[number][0]
        scale = wide.abs().amax(1, keepdim=True) / 448
        bound = torch.maximum(wide.abs() / 16, scale / 1024) * (1 + 1e-6)
        came = int(counts[1].sum())
        assert ((rows - wide).abs() <= bound)[:came].all()
        assert ((rows - wide).abs() > bound / 2)[:came].any()


@pytest.mark.parametrize("payload", ["model", "fp8"])
def test_a_token_is_sent_once_to_a_rank_and_counted_so(payload: str) -> None:
    case = draw_case(replace(DISPATCH, payload=payload, ranks=4, top_k=5, experts=8), 30)
    op = case.dispatch
    taken = run_ranks(
        4, lambda end: (dispatch(op, end, *case.rows[end.rank]), end.traffic.take(), end.traffic.take())[1:]
    )
    row = 16 * 4 if payload == "model" else 16 + 4
    message = -(-(row + 5 * 8) // 16) * 16
    for rank, (first, second) in enumerate(taken):
        owners = [set((ids // 2).tolist()) for ids in case.rows[rank][1]]
        came = [set((ids // 2).tolist()) for other in range(4) if other != rank for ids in case.rows[other][1]]
        assert first["dispatch"].sent == message * sum(len(own - {rank}) for own in owners)
        assert first["dispatch"].received == message * sum(rank in own for own in came)
        assert (first["counts"].sent, first["counts"].received) == (12, 12)
        assert second == {}


def test_one_rank_is_no_wire() -> None:
    """Through the operations themselves, as the interpreter calls them."""
    case = draw_case(replace(DISPATCH, ranks=1), 5)
    rows, ids, weights, places, counts = case.dispatch.compute(*case.rows[0])
    assert all(torch.equal(a, b) for a, b in zip((rows, ids, weights), case.rows[0], strict=True))
    (output,) = case.combine.compute(rows, places, counts)
    assert torch.equal(output, rows)


def test_ranks_of_a_group_need_a_process_each() -> None:
    case = draw_case(DISPATCH, 3)
    with pytest.raises(CompatibilityError, match="ranks 0 to 1 exchange rows, and this process is none of several"):
        case.dispatch.compute(*case.rows[0])


def test_ranks_of_unequal_steps_are_refused() -> None:
    case = draw_case(DISPATCH, 6)
    uneven = Case(case.dispatch, case.combine, [case.rows[0], tuple(t[:1] for t in case.rows[1])])  # type: ignore[list-item]
    with pytest.raises(CompatibilityError, match="rows come to rank 1 of 2, which has room for 2"):
        dispatch_all(uneven)


@pytest.mark.parametrize("op", [DISPATCH, replace(DISPATCH, payload="fp8", dtype="bfloat16")])
def test_an_empty_step_still_meets_the_other_ranks(op: MoeDispatch) -> None:
    shapes = [(0, op.hidden), (0, op.top_k), (0, op.top_k)]
    assert [type(step).__name__ for step in op.launches(shapes)] == ["Launch", "Exchange", "Exchange"]
    assert [resolve(output, shapes)[0] for output in op.outputs()] == [0, 0, 0, 0, 2]


def test_workspace_is_what_can_go_and_come() -> None:
    op = MoeDispatch(dtype="bfloat16", payload="model", first=0, ranks=8, experts=256, top_k=8, hidden=7168)
    message = 7168 * 2 + 64
    shapes = [(512, 7168), (512, 8), (512, 8)]
    assert op.message.bytes == message
    assert op.scratch_bytes(shapes) == 512 * 8 * 4 + 2 * 512 * 8 * message
    exchanges = [step for step in op.launches(shapes) if isinstance(step, Exchange)]
    assert [(step.name, step.row_bytes, step.most) for step in exchanges] == [
        ("counts", 4, 8),
        ("dispatch", message, 4096),
    ]
