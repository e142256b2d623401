"""A program without the rounding of its linears' inputs: what is left is what weights alone do.

Where inputs are quantized (FP8, SmoothQuant), a value next to the middle between two steps falls to one side here and
to the other there, and one step is far more than what the order of sums does. So a proof that a network is another
implementation's to many digits looks at this program; what the rounding itself costs is measured apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plugins.registry import OPERATIONS, make_operation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.network.program import Node, Program


def widen_inputs(program: Program) -> Program:
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
                attributes=_widen_attributes(node),
            )
            for node in program.nodes
            if node.outputs[0].name not in rounded.keys() | whole.keys()
        ),
    )


def _widen_attributes(node: Node) -> Mapping[str, Any]:
    if node.kind not in OPERATIONS:
        return node.attributes
    return make_operation(node.kind, node.attributes).without_rounding().attributes()
