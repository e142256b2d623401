"""The two ends of the decoder, spread over tensor ranks by vocabulary: tokens to rows, rows to logits."""

from __future__ import annotations

from pipeline.network import inputs
from pipeline.network.context import Context
from pipeline.network.graph import Graph, Tensor
from pipeline.network.local import keep_own
from pipeline.network.weights import Operand, lower, multiply

EMBEDDING = "vocab_embedding.weight"


def embed(g: Graph, context: Context) -> Tensor:
    """[T, H] of the step's tokens, on every rank. A token is a row of one rank, and zero on the others."""
    ids, rank = context.inputs[inputs.INPUT_IDS.name], context.spec.rank
    if rank.parallel.tensor == 1:
        return g.gather("embedding", _embedding(g, context), ids)
    at, size = g.at("embedding"), context.sizes.vocabulary
    own, inside = keep_own(at, ids, rank.tensor * size, size)
    mask = at.reshape("mask", at.cast("inside_as_model", inside, g.dtype), (-1, 1))
    rows = at.product("own_rows", at.gather("rows", _embedding(g, context), own), mask)
    return g.all_reduce("embedding", rows, rank.tensor_group)


def logits(g: Graph, context: Context, x: Tensor) -> Tensor:
    """x [N, H] → [N, V] in float32, whole on every rank."""
    a, size, rank = context.architecture, context.sizes.vocabulary, context.spec.rank
    if a.tie_word_embeddings:
        head = Operand(weight=_embedding(g, context), transposed=True)
    else:
        head = lower(g.at("lm_head"), context.weights, "lm_head", size, a.hidden_size)
    found = multiply(g, "lm_head", x, head)
    if rank.parallel.tensor > 1:
        at = g.at("lm_head")
        parts = at.reshape(
            "parts", at.all_gather("gathered", found, rank.tensor_group), (rank.parallel.tensor, -1, size)
        )
        found = at.reshape("whole", parts, (-1, a.vocab_size), first=(1, 0, 2))
    return found if g.dtype == "float32" else g.cast("logits", found, "float32")


def _embedding(g: Graph, context: Context) -> Tensor:
    """The rank's rows. A tied head meets it again."""
    if EMBEDDING in g.tensors:
        return g.tensors[EMBEDDING]
    shape = (context.sizes.vocabulary, context.architecture.hidden_size)
    return g.constant(EMBEDDING, context.weights.read(f"transformer.{EMBEDDING}", shape))
