"""Nodes that are plugins: executed by their references."""

from __future__ import annotations

from typing import Any

from pipeline.interpreter.operations.site import Kernel, Site
from plugins.registry import make_operation


def compile_plugin(site: Site) -> Kernel:
    """As wide as the inputs come: what a reference computes is rounded to the type of what it was given."""
    operation = make_operation(site.node.kind, dict(site.node.attributes))
    several = len(site.node.outputs) > 1

    def compute(*inputs: Any) -> Any:
        outputs = operation.compute(*inputs)
        return outputs if several else outputs[0]

    return compute
