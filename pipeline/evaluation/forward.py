"""Runs a network in the interpreter over a schedule of steps, whole or one slice of layers at a time.

Slices are what keeps memory flat: each holds its own layers' weights, reads the hidden states that the slice before it
left, and is dropped. The steps, the pools and the weights are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.checkpoint.tensors import release_layer
from pipeline.evaluation.activations import Activations
from pipeline.network import inputs

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.evaluation.schedule import Step
    from pipeline.interpreter.numerics import Mode
    from pipeline.network.program import Program
    from pipeline.network.spec import NetworkSpec

# Prepared weights kept between steps; what a large layer has beyond that is prepared at each use.
RESIDENT_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One result of one step: `rows` [T, H] after decoder layer `layer`, or the step's logits [T, V] where it is None.
    Rows are in the step's packed order."""

    step: int
    layer: int | None
    rows: torch.Tensor


def read_program(
    source: TensorSource, architecture: Architecture, spec: NetworkSpec, layers: tuple[int, int] | None = None
) -> Program:
    """Writes the network (or the slice `layers` of it) with TensorRT's API and reads it back."""
    import tensorrt_rtx as trt

    from pipeline.network.network import build_network
    from pipeline.network.readback import read_network

    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(0)
    return read_network(build_network(trt, network, replace(spec, layers=layers), architecture, source))


def digest_network(source: TensorSource, architecture: Architecture, spec: NetworkSpec) -> str:
    """The digest of the whole network, with no more of its weights in memory than one constant."""
    import tensorrt_rtx as trt

    from pipeline.network.network import build_stripped_network
    from pipeline.network.readback import read_network

    network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(0)
    return read_network(build_stripped_network(trt, network, spec, architecture, source)).digest()


def run_network(
    source: TensorSource,
    architecture: Architecture,
    spec: NetworkSpec,
    steps: Sequence[Step],
    *,
    num_blocks: int,
    mode: Mode,
    segments: Sequence[tuple[int, int]],
    folder: Path | None = None,
    widen: Callable[[Program], Program] | None = None,
    resident_bytes: int = RESIDENT_BYTES,
) -> Iterator[Event]:
    """Yields, segment by segment and step by step, every layer's output and at last the logits. Between two segments,
    many tokens' hidden states wait in a file in `folder` (None: where temporary files go). `widen`: of
    network/widening.py, what leaves roundings out. `resident_bytes`: of weights prepared once for all steps."""
    import torch

    from pipeline.interpreter.interpreter import Interpreter

    rows = [len(step.inputs[inputs.SLOT_IDS.name]) for step in steps]
    with closing(Activations(rows, architecture.hidden_size, folder=folder)) as activations:
        for first, last in segments:
            program = read_program(source, architecture, spec, (first, last))
            program = widen(program) if widen else program
            interpreter = Interpreter(program, mode=mode, resident_bytes=resident_bytes)
            slice_spec = replace(spec, layers=(first, last))
            cached = {pool.name for pool in inputs.pools(architecture, slice_spec)}
            pools = {
                pool.name: torch.zeros((num_blocks, *pool.shape[1:]), dtype=interpreter.numerics.held(pool.dtype))
                for pool in program.inputs
                if pool.name in cached
            }
            wanted = [port.name for port in inputs.step_inputs(architecture, slice_spec)]
            result = inputs.result(architecture, slice_spec).name
            taps = [inputs.layer_output(layer) for layer in range(first, last)]
            for i, step in enumerate(steps):
                hidden = None if first == 0 else activations.get(i)
                feeds = _feed(step.inputs, hidden, wanted) | pools
                with torch.inference_mode():
                    outputs = interpreter.run(feeds, taps=taps)
                for layer in range(first, last):
                    yield Event(step=i, layer=layer, rows=outputs[inputs.layer_output(layer)])
                if last == architecture.num_layers:
                    yield Event(step=i, layer=None, rows=outputs[result])
                else:
                    activations.put(i, outputs[result])
            if len(segments) > 1:
                del program, interpreter, feeds, outputs, pools  # before the next layer is read
                for layer in range(first, last):
                    release_layer(source, layer)


def _feed(
    step_inputs: Mapping[str, torch.Tensor], hidden: torch.Tensor | None, wanted: Sequence[str]
) -> dict[str, torch.Tensor]:
    feeds = {name: step_inputs[name] for name in wanted if name in step_inputs}
    if hidden is not None:
        feeds[inputs.HIDDEN_STATES] = hidden
    return feeds
