"""Small networks made with TensorRT itself and read back: what the interpreter's operations are tested on.

program = read(lambda g: {"y": g.sum("y", feed(g, "a", "float32", (-1, 3)), feed(g, "b", "float32", (1, 3)))})
result = run(program, a=…, b=…)["y"]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.numerics import Mode
from pipeline.network.graph import Graph
from pipeline.network.network import Network
from pipeline.network.program import Node, Program, TensorSpec
from pipeline.network.readback import read_network
from pipeline.network.spec import NetworkSpec

Build = Callable[[Graph], dict[str, Any]]


def feed(g: Graph, name: str, dtype: str, shape: Sequence[int]) -> Any:
    """A network input of any shape."""
    return g.network.add_input(name, g.type(dtype), tuple(shape))


def read(build: Build, dtype: str = "float32") -> Program:
    """`build` writes layers and returns the network's outputs; `g.network` does what Graph has no method for."""
    import tensorrt_rtx as trt

    network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(0)
    graph = Graph(trt=trt, network=network, dtype=dtype)
    for name, tensor in build(graph).items():
        tensor.name = name
        network.mark_output(tensor)
    spec = NetworkSpec(dtype=dtype, max_seq_len=8)
    architecture: Any = None  # reading back does not look at it
    return read_network(
        Network(trt=trt, network=network, spec=spec, architecture=architecture, constants=graph.constants)
    )


def run(
    program: Program, mode: Mode = "exact", *, taps: Sequence[str] = (), atol: float = 1e-6, **feeds: torch.Tensor
) -> Any:
    """One run with and one without the optimizations, which must agree within `atol`; the outputs of the one
    with."""
    plain = Interpreter(program, mode=mode, optimize=False).run({k: v.clone() for k, v in feeds.items()}, taps=taps)
    result = Interpreter(program, mode=mode).run(feeds, taps=taps)
    for name, tensor in result.items():
        assert tensor.dtype == plain[name].dtype
        torch.testing.assert_close(tensor, plain[name], rtol=1e-5, atol=atol, equal_nan=True)
    return result


def program(
    nodes: Sequence[Node], inputs: Sequence[TensorSpec], outputs: Sequence[str], constants: dict[str, torch.Tensor]
) -> Program:
    """A program by hand, for what TensorRT refuses to write."""
    from pipeline.checkpoint.tensors import RawTensor

    made = {spec.name: spec for node in nodes for spec in node.outputs}
    specs = {
        name: TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in constants.items()
    }
    return Program(
        inputs=tuple(inputs),
        outputs=tuple(made[name] for name in outputs),
        nodes=tuple(nodes),
        constants={name: RawTensor.from_torch(tensor) for name, tensor in constants.items()},
        constant_specs=specs,
    )
