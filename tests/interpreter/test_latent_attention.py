"""Attention of all heads over one pool of latents, in C and in torch's parts, against float64."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.interpreter import native as library
from pipeline.interpreter.native.kernel import NativeKernel
from pipeline.interpreter.numerics import Numerics
from pipeline.interpreter.operations import page_calls, paged_attention
from pipeline.interpreter.operations.site import Site
from pipeline.network.program import Node, TensorSpec
from tests.interpreter.test_chunk_attention import SIZE, Step, draw

WIDTH, VALUES = 44, 32


def latents(heads: int, counts: list[int], lengths: list[int]) -> Step:
    """As the chunks of other attention, with one pool, of which others' rows are NaN."""
    step = draw(1, 1, counts, lengths)
    generator = torch.Generator().manual_seed(heads)
    pool = torch.randn(len(step.k), 1, SIZE, WIDTH, generator=generator)
    pool[step.k[..., 0].isnan()] = math.nan
    q = torch.randn(sum(counts), heads, WIDTH, generator=generator)
    return replace(step, q=q / 3, k=pool, v=pool)


def inputs(step: Step) -> tuple[Any, ...]:
    heads = step.q.shape[1]
    bias = step.bias.repeat_interleave(heads, 2)
    single = step.pad.shape[1] == 1 and torch.equal(step.pad.flatten(), torch.arange(len(step.pad)))
    pad_rows, unpad_rows = (None, None) if single else (step.pad.flatten(), step.unpad)
    return step.q, step.k, step.table, bias, step.pad, pad_rows, step.unpad, unpad_rows


def in_order(step: Step) -> Step:
    """One row of each sequence, in the sequences' order."""
    count = len(step.pad)
    return replace(
        step,
        q=step.q[step.pad.flatten().long()],
        pad=torch.arange(count).int()[:, None],
        unpad=torch.arange(count).int(),
    )


def compile_kernel(monkeypatch: pytest.MonkeyPatch, heads: int, held: torch.dtype, variant: str) -> Any:
    monkeypatch.setattr(Numerics, "held", lambda *_: held)
    found = None
    if variant != "torch":
        found = library.load_library(*(["-DPORTABLE"] if variant == "portable" else []))
        assert found is not None, "no C compiler with OpenMP"
    monkeypatch.setattr(paged_attention, "load_library", lambda: found)
    specs = (
        TensorSpec(name="q", dtype="float32", shape=(-1, heads, WIDTH)),
        TensorSpec(name="pool", dtype="float32", shape=(-1, 1, SIZE, WIDTH)),
    )
    output = TensorSpec(name="y", dtype="float32", shape=(-1, heads, VALUES))
    attributes = {"heads": heads, "width": VALUES}
    node = Node(kind="attend_latent", name="a", inputs=("q", "pool"), outputs=(output,), attributes=attributes)
    none: Any = None
    site = Site(node=node, inputs=specs, numerics=Numerics("fast"), constant=none, parts=none, prepare=none)
    kernel = paged_attention.compile_attend_latent(site)
    assert isinstance(kernel, NativeKernel) == (variant != "torch")
    return kernel


def expected(step: Step) -> torch.Tensor:
    result = torch.empty(*step.q.shape[:2], VALUES, dtype=torch.float64)
    for row in range(len(step.q)):
        b, i = divmod(int(step.unpad[row]), step.pad.shape[1])
        bias = step.bias[b, 0, i].double()
        seen = bias > -math.inf
        keys = torch.cat([step.k[block, 0] for block in step.table[b].tolist()]).double()[seen]
        scores = step.q[row].double() @ keys.T + bias[seen]
        result[row] = torch.softmax(scores, dim=-1) @ keys[:, :VALUES]
    return result


@pytest.mark.parametrize("variant", ["torch", "native", "portable"])
@pytest.mark.parametrize("heads", [1, 4, 11, 16])
@pytest.mark.parametrize("lengths", [[1], [40, 3, 33], [130, 64]])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_one_row_of_each_sequence(
    monkeypatch: pytest.MonkeyPatch, variant: str, heads: int, lengths: list[int], held: torch.dtype
) -> None:
    step = in_order(latents(heads, [1] * len(lengths), lengths))
    if variant == "torch":  # which multiplies what is masked, in fp32 on some processors
        step, held = replace(step, k=step.k.nan_to_num(0), v=step.v.nan_to_num(0)), torch.float32
    step = replace(step, q=step.q.to(held), k=step.k.to(held), v=step.v.to(held), bias=step.bias.to(held))
    y = compile_kernel(monkeypatch, heads, held, variant)(*inputs(step))
    bound = 5e-6 if held is torch.float32 else 0.03
    torch.testing.assert_close(y.double(), expected(step), rtol=bound, atol=bound)


@pytest.mark.parametrize("variant", ["torch", "native", "portable"])
@pytest.mark.parametrize("heads", [1, 11, 16, 80])
@pytest.mark.parametrize(("counts", "lengths"), [([5], [5]), ([33, 1, 7], [33, 100, 64]), ([70], [130])])
def test_chunks(
    monkeypatch: pytest.MonkeyPatch, variant: str, heads: int, counts: list[int], lengths: list[int]
) -> None:
    step = latents(heads, counts, lengths)
    if variant == "torch":
        step = replace(step, k=step.k.nan_to_num(0), v=step.v.nan_to_num(0))
    y = compile_kernel(monkeypatch, heads, torch.float32, variant)(*inputs(step))
    torch.testing.assert_close(y.double(), expected(step), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["native", "portable"])
@pytest.mark.parametrize("heads", [1, 11, 80])
def test_chunks_of_long_keys(monkeypatch: pytest.MonkeyPatch, variant: str, heads: int) -> None:
    """Which are not transposed."""
    monkeypatch.setitem(globals(), "WIDTH", 288)
    monkeypatch.setitem(globals(), "VALUES", 256)
    step = latents(heads, [33, 1, 7], [33, 100, 64])
    step = replace(step, q=step.q / 3)
    y = compile_kernel(monkeypatch, heads, torch.float32, variant)(*inputs(step))
    torch.testing.assert_close(y.double(), expected(step), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [[1, 1], [9, 5]])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch, counts: list[int], threads: int) -> None:
    step = latents(16, counts, [130, 20])
    step = in_order(step) if counts == [1, 1] else step
    kernel = compile_kernel(monkeypatch, 16, torch.float32, "native")
    alone = kernel(*inputs(step))
    monkeypatch.setattr(page_calls, "FEWEST_SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(kernel(*inputs(step)), alone)


def test_nan_shows_in_its_sequence_and_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step = in_order(latents(4, [1, 1, 1], [40, 5, 9]))
    kernel = compile_kernel(monkeypatch, 4, torch.float32, "native")
    alone = kernel(*inputs(step))
    step.k[int(step.table[0, 0]), :, 3] = math.nan
    step.q[1, 2] = math.nan
    y = kernel(*inputs(step))
    assert y[0].isnan().all() and y[1, 2].isnan().all()
    assert torch.equal(y[2], alone[2]) and torch.equal(y[1, [0, 1, 3]], alone[1, [0, 1, 3]])


@pytest.mark.parametrize("block", [-1, 7])
@pytest.mark.parametrize("counts", [[1, 1], [9, 5]])
def test_blocks_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, block: int, counts: list[int]) -> None:
    step = latents(4, counts, [70, 5])
    step = in_order(step) if counts == [1, 1] else step
    assert len(step.k) == 7
    step.table[0, 1] = block
    with pytest.raises(IndexError, match="none of the 7 of the cache"):
        compile_kernel(monkeypatch, 4, torch.float32, "native")(*inputs(step))
