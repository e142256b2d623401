from typing import Any

import numpy as np
import pytest
import torch

from pipeline.interpreter.errors import UnsupportedLayerError
from pipeline.interpreter.interpreter import Interpreter
from tests.interpreter.networks import feed, read, run


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def angles(positions: int, half: int) -> np.ndarray:
    return np.outer(np.arange(positions), 10000.0 ** (-np.arange(half) / half))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 4])
def test_rotary_turns_each_pair_by_its_angle(interleaved: bool, dim: int) -> None:
    """Against multiplication by exp(i angle), pair by pair."""
    table, width = angles(16, dim // 2), 8

    def build(g: Any) -> dict[str, Any]:
        tables = [g.number(n, f(table), "float32") for n, f in (("cos", np.cos), ("sin", np.sin))]
        layer = g.network.add_rotary_embedding(feed(g, "x", "float32", (-1, 3, -1, width)), *tables, interleaved, dim)
        layer.set_input(3, feed(g, "positions", "int32", (-1, -1)))
        return {"y": layer.get_output(0)}

    x, positions = random(2, 3, 5, width), torch.tensor([[3, 0, 15, 7, 7], [1, 2, 3, 4, 5]], dtype=torch.int32)
    rotated = x[..., :dim].double().numpy()
    pairs = rotated[..., 0::2] + 1j * rotated[..., 1::2]
    if not interleaved:
        pairs = rotated[..., : dim // 2] + 1j * rotated[..., dim // 2 :]
    turned = pairs * np.exp(1j * table[positions.numpy()])[:, None]
    parts = np.stack([turned.real, turned.imag], -1).reshape(rotated.shape)
    if not interleaved:
        parts = np.concatenate([turned.real, turned.imag], -1)
    expected = np.concatenate([parts, x[..., dim:].numpy()], -1)
    result = run(read(build), x=x, positions=positions)["y"].numpy()
    np.testing.assert_allclose(result, expected, atol=1e-6)


POOL = (4, 2, 4, 3)  # blocks, heads, rows, width


def cache_network(form: str, dtype: str = "float32") -> Any:
    def build(g: Any) -> dict[str, Any]:
        cache = feed(g, "cache", dtype, (-1, *POOL[1:]))
        shape = (-1, 2, 3) if form == "PACKED_NHD" else (-1, 2, -1, 3)
        layer = g.network.add_kv_cache_update(
            cache, feed(g, "update", dtype, shape), feed(g, "starts", "int32", (-1,)), g.trt.KVCacheMode.LINEAR
        )
        layer.update_form = getattr(g.trt.AttentionIOForm, form)
        if form == "PACKED_NHD":
            layer.update_lengths = feed(g, "lengths", "int32", (-1,))
        return {"out": layer.get_output(0)}

    return read(build)


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_packed_rows_go_to_their_block_in_place(optimize: bool, overflow: bool) -> None:
    lengths = torch.tensor([0, 0, 3, 3, 5], dtype=torch.int32)  # three rows to block 1, two to block 3
    starts = torch.tensor([0, 1, 9, 3 if overflow else 2], dtype=torch.int32)
    update, cache = random(5, 2, 3), random(*POOL, seed=1)
    expected = cache.clone()
    for block in range(4):
        for row in range(lengths[block], lengths[block + 1]):
            place = int(starts[block]) + row - int(lengths[block])
            if place < POOL[2]:  # beyond the block: TensorRT drops it
                expected[block, :, place] = update[row]
    out = Interpreter(cache_network("PACKED_NHD"), mode="exact", optimize=optimize).run(
        {"cache": cache, "update": update, "starts": starts, "lengths": lengths}
    )["out"]
    assert torch.equal(cache, expected)
    assert out.data_ptr() == cache.data_ptr()


def test_padded_rows_go_to_their_block_in_place() -> None:
    cache, update = random(*POOL), random(4, 2, 2, 3, seed=1)
    starts = torch.tensor([0, 2, 3, 4], dtype=torch.int32)
    expected = cache.clone()
    for block, start in enumerate(starts.tolist()):
        for row in range(2):
            if start + row < POOL[2]:
                expected[block, :, start + row] = update[block, :, row]
    Interpreter(cache_network("PADDED_BHND"), mode="exact").run({"cache": cache, "update": update, "starts": starts})
    assert torch.equal(cache, expected)


def attention_network(dtype: str, heads: int, kv_heads: int, mask: str | None, causal: str = "NONE") -> Any:
    def build(g: Any) -> dict[str, Any]:
        q = feed(g, "q", dtype, (-1, heads, -1, 16))
        k, v = (feed(g, name, dtype, (-1, kv_heads, -1, 16)) for name in "kv")
        layer = g.network.add_attention_v2(
            q, k, v, g.trt.AttentionNormalizationOp.SOFTMAX, getattr(g.trt.CausalMaskKind, causal)
        )
        if mask is not None:
            layer.mask = feed(g, "mask", mask, (-1, 1, -1, -1))
        layer.name, layer.decomposable = "attention", True
        return {"y": layer.get_output(0)}

    return read(build, dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: np.ndarray) -> np.ndarray:
    """In double precision, head by head."""
    group = q.shape[1] // k.shape[1]
    out = np.empty(q.shape)
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            scores = q[batch, head].double().numpy() @ k[batch, head // group].double().numpy().T
            scores = scores + np.broadcast_to(bias, (q.shape[0], 1, *scores.shape))[batch, 0]
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[batch, head] = p / p.sum(-1, keepdims=True) @ v[batch, head // group].double().numpy()
    return out


@pytest.mark.parametrize("mask", [None, "bool", "float32"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("queries", [1, 5])
def test_attention_masks_and_shares_heads(mask: str | None, heads: int, kv_heads: int, queries: int) -> None:
    q, k, v = random(2, heads, queries, 16), random(2, kv_heads, 9, 16, seed=1), random(2, kv_heads, 9, 16, seed=2)
    feeds, bias = {"q": q, "k": k, "v": v}, np.zeros((2, 1, queries, 9))
    if mask == "bool":
        allowed = random(2, 1, queries, 9, seed=3) > 0
        allowed[..., 0] = True
        feeds["mask"], bias = allowed, np.where(allowed.numpy(), 0, -np.inf)
    elif mask == "float32":
        feeds["mask"] = random(2, 1, queries, 9, seed=3)
        bias = feeds["mask"].numpy()
    result = run(attention_network("float32", heads, kv_heads, mask), **feeds)["y"]
    np.testing.assert_allclose(result.numpy(), attend(q, k, v, bias), atol=2e-6)


@pytest.mark.parametrize("causal", ["UPPER_LEFT", "LOWER_RIGHT"])
def test_causal_attention_anchors_where_it_says(causal: str) -> None:
    q, k, v = random(1, 2, 3, 16), random(1, 2, 7, 16, seed=1), random(1, 2, 7, 16, seed=2)
    offset = 0 if causal == "UPPER_LEFT" else 4
    bias = np.where(np.arange(7)[None, :] <= np.arange(3)[:, None] + offset, 0, -np.inf)
    result = run(attention_network("float32", 2, 2, None, causal), q=q, k=k, v=v)["y"]
    np.testing.assert_allclose(result.numpy(), attend(q, k, v, bias), atol=2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("optimize", [False, True])
def test_declared_attention_rounds_its_result(dtype: str, optimize: bool) -> None:
    """Within two units of the type: the probabilities may be rounded too before they meet v, as in a fused kernel."""
    held = getattr(torch, dtype)
    q, k, v = ((random(2, 4, 5, 16, seed=s) * 0.5).to(held) for s in range(3))
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    program = attention_network(dtype, 4, 4, "bool")
    feeds = {"q": q, "k": k, "v": v, "mask": allowed}
    result = Interpreter(program, mode="declared", optimize=optimize).run(feeds)["y"]
    expected = attend(q, k, v, np.where(allowed.numpy(), 0, -np.inf))
    assert result.dtype == held
    np.testing.assert_allclose(result.double().numpy(), expected, atol=2 * torch.finfo(held).eps)


def test_attention_over_packed_rows_is_refused() -> None:
    from dataclasses import replace

    program = attention_network("float32", 2, 2, None)
    node = replace(program.nodes[0], attributes={**program.nodes[0].attributes, "query_form": "packed_nhd"})
    with pytest.raises(UnsupportedLayerError, match=r"attention.*packed_nhd"):
        Interpreter(replace(program, nodes=(node,)), mode="exact")
