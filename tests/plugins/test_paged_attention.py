"""The kernels against their references: ragged batches over scattered blocks, split or not, windowed or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.operation import Argument, Operation
from plugins.paged_attention.operation import PagedAttention, PagedLatentAttention
from plugins.paged_attention.sizes import PROGRAMS, QUANTIZED, count_singles
from plugins.simulator import Simulator
from tests.plugins.steps import EXAMPLES, LAYOUTS, Step, lay_out, make_step, spans

GROUPED = PagedAttention(
    dtype="float32", heads=4, kv_heads=2, head_size=16, block_size=16, window=0, pool_dtype="float32"
)
LATENT = PagedLatentAttention(
    dtype="float32", heads=3, rank=32, rotary_size=16, block_size=16, window=0, pool_dtype="float32"
)
# Type of queries, type of pools, largest difference: of values of about 1, in 16 bits with probabilities rounded to it.
TYPES = [
    *(("float32", "float32", 2e-6), ("float16", "float16", 4e-3), ("bfloat16", "bfloat16", 3e-2)),
    *(("float32", "int8", 2e-5), ("float32", "fp8", 2e-4), ("bfloat16", "fp8", 1e-1)),
    *(("float16", "int8", 2e-2), ("float16", "fp8", 2e-2)),
]
SPLIT = [(700, 1), (3, 1), (255, 1)]  # single tokens, one of them with enough keys for three programs


def make_inputs(op: PagedAttention | PagedLatentAttention, step: Step) -> list[torch.Tensor]:
    grouped = isinstance(op, PagedAttention)
    width = op.head_size if isinstance(op, PagedAttention) else op.rank + op.rotary_size
    kv_heads = op.kv_heads if isinstance(op, PagedAttention) else 1
    pools = [
        step.draw(step.blocks, kv_heads, op.block_size, width, dtype=op.pool_dtype) for _ in range(2 if grouped else 1)
    ]
    query = (step.draw(step.rows, op.heads, width) * width**-0.5).to(getattr(torch, op.dtype))
    scales = [step.scales(2, kv_heads) if grouped else step.scales(2)] if op.pool_dtype in QUANTIZED else []
    inputs = [step.inputs[name] for name in ("slot_ids", "pad_index", "block_tables")]
    return [query, *pools, *inputs, *scales]


def check(
    simulator: Simulator,
    op: PagedAttention | PagedLatentAttention,
    step: Step,
    bound: float,
    layout: str = "dense",
) -> None:
    inputs = make_inputs(op, step)
    (found,), (wanted,) = simulator.run(op, inputs), op.compute(*(lay_out(tensor, layout) for tensor in inputs))
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=bound, atol=bound)


# Heads as models have them: Llama's and Qwen2's, DeepSeek's latent.
WIDE = [
    replace(GROUPED, heads=8, head_size=128, block_size=64),
    replace(LATENT, heads=16, rank=512, rotary_size=64, block_size=64),
]


@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(types[:2]))
@pytest.mark.parametrize("op", [GROUPED, LATENT, *WIDE])
def test_every_type_and_size_of_heads(
    simulator: Simulator, op: PagedAttention | PagedLatentAttention, types: tuple[str, str, float]
) -> None:
    op = replace(op, dtype=types[0], pool_dtype=types[1])
    check(simulator, op, make_step([(40, 1), (0, 5)], op.block_size), types[2])


@EXAMPLES
@given(
    where=spans(longest=70),
    types=st.sampled_from(TYPES),
    heads=st.sampled_from([(1, 1), (6, 2), (8, 1)]),
    head_size=st.sampled_from([8, 16, 40]),
    window=st.sampled_from([0, 0, 1, 20]),
    block_size=st.sampled_from([16, 32, 128]),
    layout=LAYOUTS,
)
def test_grouped_heads_attend_to_their_pages(
    simulator: Simulator,
    where: list[tuple[int, int]],
    types: tuple[str, str, float],
    heads: tuple[int, int],
    head_size: int,
    window: int,
    block_size: int,
    layout: str,
) -> None:
    op = replace(
        GROUPED, dtype=types[0], pool_dtype=types[1], heads=heads[0], kv_heads=heads[1], head_size=head_size,
        window=window, block_size=block_size,
    )  # fmt: skip
    check(simulator, op, make_step(where, block_size), types[2], layout)


@EXAMPLES
@given(
    where=spans(longest=70),
    types=st.sampled_from(TYPES),
    heads=st.sampled_from([1, 3, 20]),
    sizes=st.sampled_from([(16, 16), (48, 8), (32, 24)]),
    window=st.sampled_from([0, 0, 20]),
    block_size=st.sampled_from([16, 64]),
    layout=LAYOUTS,
)
def test_latent_heads_attend_to_their_pages(
    simulator: Simulator,
    where: list[tuple[int, int]],
    types: tuple[str, str, float],
    heads: int,
    sizes: tuple[int, int],
    window: int,
    block_size: int,
    layout: str,
) -> None:
    op = replace(
        LATENT, dtype=types[0], pool_dtype=types[1], heads=heads, rank=sizes[0], rotary_size=sizes[1], window=window,
        block_size=block_size,
    )  # fmt: skip
    check(simulator, op, make_step(where, block_size), types[2], layout)


OPERATIONS = pytest.mark.parametrize("op", [GROUPED, LATENT], ids=["grouped", "latent"])


def plan(op: PagedAttention | PagedLatentAttention, step: Step) -> list[tuple[str, tuple[int, int, int]]]:
    """Function and grid of each launch."""
    launches = op.launches([tuple(tensor.shape) for tensor in make_inputs(op, step)])
    return [(launch.kernel.function, launch.grid) for launch in launches]


def list_counts(op: PagedAttention | PagedLatentAttention, step: Step) -> list[tuple[Argument, Argument]]:
    """`least` and `most` of each launch that has them."""
    launches = op.launches([tuple(tensor.shape) for tensor in make_inputs(op, step)])
    named = [dict(zip(dict(one.kernel.parameters), one.arguments, strict=True)) for one in launches]
    return [(given["least"], given["most"]) for given in named if "least" in given]


@pytest.mark.parametrize("window", [0, 300])
@OPERATIONS
def test_long_contexts_are_split(simulator: Simulator, op: PagedAttention | PagedLatentAttention, window: int) -> None:
    op = replace(op, window=window)
    step = make_step(SPLIT, op.block_size)
    (_, grid), combined = plan(op, step)
    assert grid[2] == len(SPLIT) * (2 if window else 3)
    assert combined == ("combine", (len(SPLIT), op.heads, 1))
    check(simulator, op, step, 2e-6)


# A prompt's chunk beside single tokens of long contexts; chunks of two rows, over a long context and over none.
MIXED = [(700, 1), (30, 9), (520, 2), (0, 2), (300, 1), (0, 1)]


@pytest.mark.parametrize(
    ("types", "window"),
    [(TYPES[0], 300), (TYPES[1], 0), (TYPES[3], 0), (TYPES[5], 300)],
    ids=lambda of: "-".join(of[:2]) if isinstance(of, tuple) else str(of),
)
@OPERATIONS
def test_single_tokens_beside_chunks_are_split(
    simulator: Simulator, op: PagedAttention | PagedLatentAttention, types: tuple[str, str, float], window: int
) -> None:
    op = replace(op, window=window, dtype=types[0], pool_dtype=types[1])
    step = make_step(MIXED, op.block_size)
    assert list_counts(op, step) == [(2, 9), (1, 1)]  # nothing is done twice
    chunks, singles, combined = plan(op, step)
    assert chunks[1][2] == len(MIXED)
    assert singles[1][2] == len(MIXED) * (2 if window else 3)
    assert combined == ("combine", (len(MIXED), op.heads, 1))
    check(simulator, op, step, types[2])


@pytest.mark.parametrize("op", WIDE, ids=["grouped", "latent"])
def test_models_heads_are_split_beside_chunks(simulator: Simulator, op: PagedAttention | PagedLatentAttention) -> None:
    step = make_step([(600, 1), (64, 5)], op.block_size)
    assert len(plan(op, step)) == 3
    check(simulator, op, step, 2e-6)


@settings(EXAMPLES, max_examples=6)
@given(where=spans(longest=700), op=st.sampled_from([GROUPED, LATENT]), heads=st.sampled_from([2, 20]))
def test_any_mixture_of_long_contexts(
    simulator: Simulator, where: list[tuple[int, int]], op: PagedAttention | PagedLatentAttention, heads: int
) -> None:
    check(simulator, replace(op, heads=heads), make_step(where, op.block_size), 2e-6)


@OPERATIONS
def test_what_has_no_long_single_token_is_one_launch(op: PagedAttention | PagedLatentAttention) -> None:
    """Prompts alone, of lengths that leave no room for a single token among them; short contexts; many sequences."""
    for where in ([(700, 9)], [(700, 9), (0, 7)], [(20, 1), (0, 9)], [(300, 1)] * PROGRAMS + [(0, 9)]):
        assert [function for function, _ in plan(op, make_step(where, op.block_size))] == ["attend"]


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_single_tokens_are_never_overlooked(counts: list[int]) -> None:
    singles = counts.count(1)
    assert singles <= count_singles(sum(counts), len(counts), max(counts)) <= len(counts)


@OPERATIONS
def test_splits_stay_within_the_workspace(op: PagedAttention | PagedLatentAttention) -> None:
    """Whatever the sequences' rows: beside chunks, too, there is room for one row of each sequence."""
    for heads in (1, 16, 128):
        sizes = replace(op, heads=heads * 2).sizes()
        for sequences in range(1, PROGRAMS + 2):
            for width in (1, 40, 4000):
                splits = sizes.splits(sequences, width)
                assert splits == 1 or sum(sizes.part_bytes(sequences, splits)) <= sizes.scratch_bytes()


@OPERATIONS
def test_an_empty_step_starts_nothing(op: Operation) -> None:
    assert op.launches([(0,) * dims for _, dims in op.INPUTS]) == ()


def test_fp8_pools_are_read_exactly(simulator: Simulator) -> None:
    check(simulator, replace(LATENT, pool_dtype="fp8"), make_step([(3, 5), (30, 1)], 16), 2e-5)


def test_the_reference_is_torchs_attention() -> None:
    step = make_step([(0, 6)], 16)
    inputs = make_inputs(GROUPED, step)
    (found,) = GROUPED.compute(*inputs)
    k, v = (pool[inputs[5][0, 0], :, :6].repeat_interleave(2, 0) for pool in inputs[1:3])
    wanted = F.scaled_dot_product_attention(inputs[0].transpose(0, 1), k, v, is_causal=True, scale=1.0)
    torch.testing.assert_close(found, wanted.transpose(0, 1))


def test_a_row_is_the_same_in_any_company() -> None:
    """To the last bit, in the reference: its own sequence in one chunk or by single tokens, alone or not."""
    alone, crowd = make_step([(0, 12)], 16, seed=1), make_step([(0, 12), (40, 9)], 16, seed=1)
    inputs, more = make_inputs(GROUPED, alone), make_inputs(GROUPED, crowd)
    own = crowd.inputs["pad_index"][0, :12].long()
    block, other = int(alone.inputs["block_tables"][0, 0]), int(crowd.inputs["block_tables"][0, 0])
    more[0][own] = inputs[0]
    for index in (1, 2):
        more[index][other] = inputs[index][block]
    (whole,), (beside,) = GROUPED.compute(*inputs), GROUPED.compute(*more)
    assert torch.equal(whole, beside[own])
