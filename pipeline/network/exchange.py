"""Expert parallelism: tokens go to the ranks that have their experts, and the results come back.

After attention's sum every rank of a tensor group has every token, so each first takes its share of them. What is
exchanged then is exchanged among the ranks that have all experts together (of one share of the columns); what comes
out is each rank's tokens, and zero for the others, so that the sum over the tensor ranks, which the shared experts need
anyway, puts the tokens together and adds up the columns.

Sizes: P ranks exchange, T tokens of the step, t = ceil(T / P) of a rank, E experts in all, k of them per token, m =
min(k, E / P), the most that a token has on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pipeline.network.context import Context
from pipeline.network.graph import Graph, Tensor
from pipeline.network.local import keep_own
from plugins.moe_all_to_all.operation import MoeCombine, MoeDispatch

# rows [R, H], weights [R, k], experts of the whole model [R, k] → the rank's own experts' weighted sum [R, H], float32
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def exchange_tokens(g: Graph, context: Context, x: Tensor, chosen: Tensor, indices: Tensor, run: Run) -> Tensor:
    """x [T, H], weights and experts [T, k] → float32 [T, H], zero for the tokens of other ranks."""
    rank = context.spec.rank
    at = g.at("share")
    rows = at.reshape("row_count", at.slice("rows", at.shape("shape", x), 0, 0, 1), (1,))
    ways = at.number("ways", [rank.parallel.expert], "int64")
    padded = at.sum("rows_rounded_up", rows, at.number("ways_less_one", [rank.parallel.expert - 1], "int64"))
    share = at.elementwise("tokens", padded, ways, "FLOOR_DIV")
    first = at.product("first", share, at.number("place", [rank.moe_expert], "int64"))
    first, share_int32 = at.cast("first_int32", first, "int32"), at.cast("tokens_int32", share, "int32")
    last = at.cast("last", at.elementwise("last_row", rows, at.number("one", [1], "int64"), "SUB"), "int32")
    # The last rank's share may go past the end: there the last token stands in, and what it gets is not read.
    wanted = at.sum("own_rows", at.count_up("count", share), first)
    own = at.elementwise("own", wanted, last, "MIN")
    mine = [at.gather(name, y, own) for name, y in (("x", x), ("weights", chosen), ("experts", indices))]
    if MoeDispatch.NAME in context.plugins:
        known = at.elementwise("known", wanted, at.cast("rows_int32", rows, "int32"), "LESS")
        result = _moe_all_to_all(g, context, mine, known, run)
    else:
        result = _all_to_all(g.at("exchange"), context, mine, run)
    back = g.at("join")
    places, inside = keep_own(back, back.count_up("rows", rows), first, share_int32)
    mask = back.reshape("mask", back.cast("inside_float32", inside, "float32"), (-1, 1))
    return back.product("tokens", back.gather("results", result, places), mask)


def _all_to_all(g: Graph, context: Context, tokens: Sequence[Tensor], run: Run) -> Tensor:
    """With TensorRT's own layers, for proof: equal splits, padded to t * m rows for each rank, one for each expert that
    a token may have there. tokens: x [t, H], weights and experts [t, k] → float32 [t, H].

    Weights stay at home: each row comes back as its expert made it, in the model's type, and is weighted here.
    """
    x, chosen, indices = tokens
    ranks = context.spec.rank.expert_group
    ways, hidden, top_k, held = len(ranks), x.shape[1], chosen.shape[1], len(context.sizes.experts)
    most = min(top_k, held)
    send = g.at("send")
    # Of each token and rank, the choices that are there, first ones first; then others, which that rank will not know.
    owners = send.elementwise("owners", indices, send.number("held", [[held]], "int32"), "FLOOR_DIV")
    peers = send.number("peers", np.arange(ways).reshape(1, ways, 1), "int32")
    there = send.elementwise("there", send.reshape("owners_by_rank", owners, (-1, 1, top_k)), peers, "EQUAL")
    is_there = send.cast("is_there", there, "float32")
    order = send.number("order", np.arange(top_k, 0, -1).reshape(1, 1, top_k), "float32")
    _, choices = send.topk("choices", send.product("ranked", is_there, order), most, 2)
    everywhere = send.number("everywhere", np.zeros((1, ways, 1)), "int32")
    experts = send.sum("experts_by_rank", send.reshape("experts_column", indices, (-1, 1, top_k)), everywhere)
    weights = send.product("weights_by_rank", send.reshape("weights_column", chosen, (-1, 1, top_k)), is_there)
    slot_experts = send.gather_elements("slot_experts", experts, choices, 2)
    slot_weights = send.gather_elements("slot_weights", weights, choices, 2)
    copies = send.cast("copies_as_model", send.number("copies", np.ones((1, ways, most, 1)), "float32"), g.dtype)
    rows = send.product("rows_by_slot", send.reshape("rows_column", x, (-1, 1, 1, hidden)), copies)
    rows = send.reshape("rows", rows, (ways, -1, hidden), first=(1, 0, 2, 3))
    numbers = send.reshape("numbers", slot_experts, (ways, -1), first=(1, 0, 2))

    came = g.at("receive")
    rows = came.reshape("rows", came.all_to_all("rows_by_rank", rows, ranks), (-1, hidden))
    numbers = came.reshape("experts", came.all_to_all("experts_by_rank", numbers, ranks), (-1, 1))
    one = came.cast("one", came.elementwise("always", numbers, numbers, "EQUAL"), "float32")
    results = came.cast("results", run(rows, one, numbers), g.dtype)

    back = g.at("return")
    returned = back.all_to_all("by_rank", back.reshape("sent", results, (ways, -1, hidden)), ranks)
    wide = back.cast("float32", back.reshape("by_slot", returned, (ways, -1, most, hidden)), "float32")
    shares = back.reshape("weights", slot_weights, (ways, -1, most, 1), first=(1, 0, 2))
    by_rank = back.reduce("slots", back.product("weighted", wide, shares), "SUM", 2, keep=False)
    return back.reduce("sum", by_rank, "SUM", 0, keep=False)


def _moe_all_to_all(g: Graph, context: Context, tokens: Sequence[Tensor], known: Tensor, run: Run) -> Tensor:
    """With the plugin: rows in their true numbers, once for each rank that has experts of theirs. tokens: as of
    _all_to_all. known: bool [t], false for what stands in past the end, and goes nowhere."""
    x, chosen, indices = tokens
    at = g.at("exchange")
    # (expert + 1) * known - 1: -1 past the end.
    one, column = at.number("one", [[1]], "int32"), at.reshape("known_column", known, (-1, 1))
    numbers = at.product("numbers_known", at.sum("numbers", indices, one), at.cast("known_int32", column, "int32"))
    experts = at.elementwise("experts", numbers, one, "SUB")
    plugins = context.plugins
    rows, numbers, weights, places, counts = g.plugin(MoeDispatch.NAME, plugins[MoeDispatch.NAME], [x, experts, chosen])
    results = at.cast("results", run(rows, weights, numbers), g.dtype)
    (back,) = g.plugin(MoeCombine.NAME, plugins[MoeCombine.NAME], [results, places, counts])
    return at.cast("tokens", back, "float32")
