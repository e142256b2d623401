"""A program without the rounding of its linears' inputs, of rows on their way to experts, or of its KV cache: what is
left is what weights alone do.

Where these are quantized (FP8, SmoothQuant; a cache in FP8 or INT8), a value next to the middle between two steps falls
to one side here and to the other there, and one step is far more than what the order of sums does. So a proof that a
network is another implementation's to many digits looks at this program; what the rounding itself costs is measured
apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plugins.registry import OPERATIONS, make_operation

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pipeline.network.program import Node, Program, TensorSpec


def widen(program: Program, *, keep: Collection[str] = ()) -> Program:
    """All of it, but for what plugins of the names `keep` round."""
    return widen_cache(widen_inputs(program, keep=keep))


def widen_inputs(program: Program, *, keep: Collection[str] = ()) -> Program:
    """Each dequantize(quantize(x)) becomes x, within plugins too; weights, which are constants, stay dequantized."""
    rounded = {node.outputs[0].name: node.inputs[0] for node in program.nodes if node.kind == "quantize"}
    whole = {
        node.outputs[0].name: rounded[str(node.inputs[0])]
        for node in program.nodes
        if node.kind == "dequantize" and node.inputs[0] in rounded
    }
    return replace(
        program,
        nodes=tuple(
            replace(
                node,
                inputs=tuple(whole.get(str(name), name) for name in node.inputs),
                attributes=node.attributes if node.kind in keep else _widen_attributes(node),
            )
            for node in program.nodes
            if node.outputs[0].name not in rounded.keys() | whole.keys()
        ),
    )


def _widen_attributes(node: Node) -> Mapping[str, Any]:
    if node.kind not in OPERATIONS:
        return node.attributes
    return make_operation(node.kind, node.attributes).without_rounding().attributes()


def widen_cache(program: Program) -> Program:
    """Every pool of the model's type, and the plugins that read and write it without scales."""
    nodes = [_widen_pools(node) for node in program.nodes]
    types: dict[str, str] = {}  # of pools, before and after their update
    for node in nodes:
        if node.kind in OPERATIONS:
            operation = make_operation(node.kind, node.attributes)
            for output, spec in zip(operation.outputs(), node.outputs, strict=True):
                if output.updates is not None:
                    types |= {spec.name: output.dtype, str(node.inputs[output.updates]): output.dtype}

    def retype(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(replace(spec, dtype=types.get(spec.name, spec.dtype)) for spec in specs)

    return replace(
        program,
        inputs=retype(program.inputs),
        outputs=retype(program.outputs),
        nodes=tuple(replace(node, outputs=retype(node.outputs)) for node in nodes),
    )


def _widen_pools(node: Node) -> Node:
    if node.kind not in OPERATIONS:
        return node
    operation = make_operation(node.kind, node.attributes).with_wide_cache()
    return replace(node, inputs=node.inputs[: len(operation.input_types())], attributes=operation.attributes())
