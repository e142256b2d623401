"""The kernels against their references, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import CompatibilityError
from plugins.operation import Operation
from plugins.rope_paged_kv.operation import STORAGE, RopePagedKv, RopePagedLatent
from plugins.simulator import Simulator
from tests.plugins.steps import EXAMPLES, LAYOUTS, Step, lay_out, make_step, spans

HEADS = RopePagedKv(
    dtype="float32", heads=3, kv_heads=1, head_size=8, rotary_size=8, interleaved=False, scale=0.3, block_size=16,
    pool_dtype="float32",
)  # fmt: skip
LATENT = RopePagedLatent(
    dtype="float32", heads=3, q_size=12, rank=16, rotary_size=8, interleaved=True, scale=0.3, block_size=16,
    pool_dtype="float32",
)  # fmt: skip
TYPES = [
    *(("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")),
    *(("float16", "int8"), ("bfloat16", "fp8"), ("float16", "fp8")),
]


def heads_inputs(op: RopePagedKv, step: Step) -> list[torch.Tensor]:
    width = (op.heads + 2 * op.kv_heads) * op.head_size
    pool = (step.blocks, op.kv_heads, op.block_size, op.head_size)
    tables = [step.draw(64, op.rotary_size // 2) for _ in range(2)]
    pools = [step.draw(*pool, dtype=op.pool_dtype) for _ in range(2)]
    scales = [step.scales(2, op.kv_heads)] if op.pool_dtype in STORAGE else []
    qkv = step.draw(step.rows, width, dtype=op.dtype)
    return [qkv, *tables, step.inputs["position_ids"], *step.places(), *pools, *scales]


def latent_inputs(op: RopePagedLatent, step: Step) -> list[torch.Tensor]:
    shapes = [
        (step.rows, op.heads * op.q_size),
        (op.heads, step.rows, op.rank),
        (step.rows, op.rank),
        (step.rows, op.rank + op.rotary_size),
    ]
    tables = [step.draw(64, op.rotary_size // 2) for _ in range(2)]
    pool = step.draw(step.blocks, 1, op.block_size, op.rank + op.rotary_size, dtype=op.pool_dtype)
    scales = [step.scales(2)] if op.pool_dtype in STORAGE else []
    data = [step.draw(*shape, dtype=op.dtype) for shape in shapes]
    return [*data, *tables, step.inputs["position_ids"], *step.places(), pool, *scales]


def run_both(
    simulator: Simulator, op: Operation, inputs: Sequence[torch.Tensor], layout: str = "dense"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the kernel makes, and what the reference makes of memory that is laid out so."""
    found = simulator.run(op, inputs)
    wanted = op.compute(*(lay_out(tensor, layout) for tensor in inputs))
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in wanted]
    return [(a.float(), b.float()) for a, b in zip(found, wanted, strict=True)]


@EXAMPLES
@given(
    where=spans(),
    types=st.sampled_from(TYPES),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3)]),
    sizes=st.sampled_from([(8, 8), (16, 8), (40, 24), (24, 24)]),
    interleaved=st.booleans(),
    block_size=st.sampled_from([16, 32]),
    layout=LAYOUTS,
)
def test_heads_are_rotated_and_written(
    simulator: Simulator,
    where: list[tuple[int, int]],
    types: tuple[str, str],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    interleaved: bool,
    block_size: int,
    layout: str,
) -> None:
    op = replace(
        HEADS, dtype=types[0], pool_dtype=types[1], heads=heads[0], kv_heads=heads[1], head_size=sizes[0],
        rotary_size=sizes[1], interleaved=interleaved, block_size=block_size,
    )  # fmt: skip
    for found, wanted in run_both(simulator, op, heads_inputs(op, make_step(where, block_size)), layout):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@EXAMPLES
@given(
    where=spans(),
    types=st.sampled_from(TYPES),
    heads=st.sampled_from([1, 3, 8]),
    sizes=st.sampled_from([(12, 16, 8), (8, 48, 8), (40, 24, 24)]),
    interleaved=st.booleans(),
    block_size=st.sampled_from([16, 32]),
    layout=LAYOUTS,
)
def test_latent_rows_are_rotated_and_written(
    simulator: Simulator,
    where: list[tuple[int, int]],
    types: tuple[str, str],
    heads: int,
    sizes: tuple[int, int, int],
    interleaved: bool,
    block_size: int,
    layout: str,
) -> None:
    op = replace(
        LATENT, dtype=types[0], pool_dtype=types[1], heads=heads, q_size=sizes[0], rank=sizes[1],
        rotary_size=sizes[2], interleaved=interleaved, block_size=block_size,
    )  # fmt: skip
    for found, wanted in run_both(simulator, op, latent_inputs(op, make_step(where, block_size)), layout):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("op", [HEADS, LATENT])
def test_every_type_of_rows_and_pools(
    simulator: Simulator, op: RopePagedKv | RopePagedLatent, types: tuple[str, str]
) -> None:
    op = replace(op, dtype=types[0], pool_dtype=types[1])
    step = make_step([(20, 1), (0, 5), (7, 3)], op.block_size)
    inputs = heads_inputs(op, step) if isinstance(op, RopePagedKv) else latent_inputs(op, step)
    for found, wanted in run_both(simulator, op, inputs):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_fp8_pools_take_what_they_can_represent(simulator: Simulator) -> None:
    """Multiples of the scale that FP8 has, unrotated, and what saturates: no cast has to round."""
    op = replace(HEADS, pool_dtype="fp8")
    step = make_step([(3, 5), (14, 1)], op.block_size)
    inputs = heads_inputs(op, step)
    exact = step.draw(*inputs[0].shape, dtype="fp8").float()
    exact[0] *= 4096
    inputs[0] = exact / 8
    inputs[1], inputs[2] = torch.ones(64, 4), torch.zeros(64, 4)
    inputs[-1] = torch.full((2, op.kv_heads), 1 / 8)
    for found, wanted in run_both(simulator, op, inputs):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(("op", "shapes"), [(HEADS, [(0, 40)] + [(0, 0)] * 9), (LATENT, [(0, 36)] + [(0, 0)] * 11)])
def test_an_empty_step_starts_nothing(op: Operation, shapes: list[tuple[int, int]]) -> None:
    assert op.launches(shapes) == ()


def test_rows_elsewhere_in_the_pools_stay(simulator: Simulator) -> None:
    step = make_step([(5, 2)], 16)
    inputs = heads_inputs(HEADS, step)
    _, k_pool, v_pool = simulator.run(HEADS, inputs)
    for before, after in ((inputs[8], k_pool), (inputs[9], v_pool)):
        assert (before != after).any(-1).sum() == 2 * HEADS.kv_heads


def test_rotated_keys_are_those_of_transformers() -> None:
    """The reference itself, against an implementation that is none of ours."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    step = make_step([(0, 6)], 16)
    inputs = heads_inputs(HEADS, step)
    query, k_pool, _ = HEADS.compute(*(tensor.clone() for tensor in inputs))
    q, k, _ = inputs[0].reshape(6, 5, 8).transpose(0, 1).unsqueeze(0).split([3, 1, 1], dim=1)
    cos, sin = (table[inputs[3].long()].repeat(1, 2).unsqueeze(0) for table in inputs[1:3])
    turned_q, turned_k = apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(query, turned_q[0].transpose(0, 1) * HEADS.scale)
    torch.testing.assert_close(k_pool[inputs[7][0, 0], 0, :6], turned_k[0, 0])


@pytest.mark.parametrize("layout", ["gaps", "turned"])
def test_memory_that_kernels_would_misread_is_refused(simulator: Simulator, layout: str) -> None:
    inputs = heads_inputs(HEADS, make_step([(3, 5)], 16))
    inputs[8] = lay_out(inputs[8], layout)
    with pytest.raises(CompatibilityError, match=r"rope_paged_kv: k_pool \[3, 1, 16, 8\] has strides"):
        simulator.run(HEADS, inputs)
