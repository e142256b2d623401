"""The operations: for each kind of node, how it becomes a function of its inputs' values.

A compiled kernel is called with one value per input slot (None where a slot is unconnected) and returns the output, or
a tuple of outputs. Inputs arrive as tensors, except that
    integers  arrive as tuples of Python integers
    absorbs   that are constants are asked for while compiling (`Site.constant`, or where there is no room to keep them
              `Site.parts`) and are None at run time
    stored    that are constants arrive in the type they are stored in, so that a gather does not widen a whole
              embedding for a few rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.interpreter.operations import (
    arithmetic,
    attention,
    collective,
    experts,
    joined,
    linear,
    movement,
    paged_attention,
    plugin,
    pointwise,
    products,
    reduction,
    rotation,
)
from pipeline.interpreter.operations.site import Kernel, Site

__all__ = ["OPERATIONS", "PLUGIN", "Kernel", "Operation", "Site"]


@dataclass(frozen=True, slots=True)
class Operation:
    compile: Callable[[Site], Kernel]
    integers: tuple[int, ...] = ()
    absorbs: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()


OPERATIONS: dict[str, Operation] = {
    "activation": Operation(arithmetic.compile_activation),
    "attention": Operation(attention.compile_attention),
    "cast": Operation(arithmetic.compile_cast),
    "concatenation": Operation(movement.compile_concatenation),
    "dist_collective": Operation(collective.compile_dist_collective),
    "dequantize": Operation(products.compile_dequantize),
    "elementwise": Operation(arithmetic.compile_elementwise),
    "fill": Operation(arithmetic.compile_fill, integers=(0,)),
    "gather": Operation(movement.compile_gather, stored=(0,)),
    "identity": Operation(movement.compile_identity),
    "kv_cache_update": Operation(attention.compile_kv_cache_update),
    "matrix_multiply": Operation(products.compile_matrix_multiply),
    "one_hot": Operation(arithmetic.compile_one_hot, integers=(2,)),
    "quantize": Operation(products.compile_quantize),
    "reduce": Operation(reduction.compile_reduce),
    "rotary_embedding": Operation(attention.compile_rotary_embedding),
    "select": Operation(arithmetic.compile_select),
    "shuffle": Operation(movement.compile_shuffle, integers=(1,)),
    "slice": Operation(movement.compile_slice, integers=(1, 2, 3)),
    "softmax": Operation(reduction.compile_softmax),
    "topk": Operation(reduction.compile_topk, integers=(1,)),
    "unary": Operation(arithmetic.compile_unary),
    # Written by fusion.py only.
    "attend": Operation(paged_attention.compile_attend),
    "attend_latent": Operation(paged_attention.compile_attend_latent),
    "attend_packed": Operation(paged_attention.compile_attend_packed),
    "attend_pages": Operation(paged_attention.compile_attend_pages),
    "attention_bias": Operation(paged_attention.compile_attention_bias),
    "cache_rows": Operation(paged_attention.compile_cache_rows),
    "gather_pages": Operation(paged_attention.compile_gather_pages),
    "linear": Operation(linear.compile_linear, absorbs=(1,)),
    "head_turns": Operation(rotation.compile_head_turns),
    "join_rotated": Operation(joined.compile_join_rotated),
    "linear_packed": Operation(linear.compile_linear_packed, absorbs=(1, 2, 3)),
    "linears_packed": Operation(linear.compile_linears_packed, absorbs=tuple(range(1, 13))),
    "rotate_heads": Operation(rotation.compile_rotate_heads),
    "rotate_into_cache": Operation(rotation.compile_rotate_into_cache),
    "page_rows": Operation(paged_attention.compile_page_rows),
    "chosen_experts": Operation(experts.compile_chosen_experts, absorbs=(*experts.STACKS, *range(8, 14))),
    "gate": Operation(pointwise.compile_gate),
    "rms_norm": Operation(pointwise.compile_rms_norm),
    "rotary_rows": Operation(rotation.compile_rotary_rows),
    "rotate": Operation(rotation.compile_rotate),
    "rotate_rows": Operation(rotation.compile_rotate_rows),
    "row_index": Operation(paged_attention.compile_row_index),
    "row_turns": Operation(rotation.compile_row_turns),
    "sum_norm": Operation(pointwise.compile_sum_norm),
    "take_rows": Operation(paged_attention.compile_take_rows),
    "write_joined": Operation(joined.compile_write_joined),
    "write_cache_rows": Operation(paged_attention.compile_write_cache_rows),
}
# Any node whose kind is the name of one of `plugins`.
PLUGIN = Operation(plugin.compile_plugin)
