"""Runs steps of an engine by shape: plainly, by a graph that TensorRT captures itself, or by one captured here.

A graph captured here holds its context's state, and what later changes that state breaks the graph: so each has a
context of its own (TensorRT's guide on CUDA graphs), and all contexts share the engine's workspace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.runtime.device import Device
from pipeline.runtime.loaded_engine import EngineContext, LoadedEngine
from pipeline.runtime.profiles import GENERATION, StepProfile

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[int, ...]]
Key = tuple[int, tuple[tuple[int, ...], ...]]
MOST_GRAPHS = 64  # kept, the least recently used go first


@dataclass(frozen=True, slots=True)
class Graph:
    """The context is never shaped again: the graph runs what it was when it was captured."""

    context: EngineContext
    replay: Callable[[], None]


class Launches:
    """tensors: what is bound, by profile and name. shapes: of the inputs whose shape is always the same, the pools.
    capture: whether generation steps are captured here."""

    def __init__(
        self,
        engine: LoadedEngine,
        device: Device,
        profiles: tuple[StepProfile, ...],
        tensors: Mapping[int, Mapping[str, torch.Tensor]],
        shapes: Shapes,
        *,
        capture: bool,
        most_graphs: int = MOST_GRAPHS,
    ) -> None:
        self._engine, self._device, self._tensors, self._shapes = engine, device, tensors, shapes
        self._most_graphs = most_graphs
        self._captured = {profile.index for profile in profiles if capture and profile.phase == GENERATION}
        # Made now, so that what fails, fails while loading.
        self._contexts = {p.index: self._make(p.index) for p in profiles if p.index not in self._captured}
        self.graphs: OrderedDict[Key, Graph] = OrderedDict()

    def run(self, profile: int, shapes: Shapes) -> None:
        """Starts a step whose inputs are in place."""
        if profile not in self._captured:
            context = self._contexts[profile]
            context.shape(shapes)
            context.enqueue()
            return
        key = (profile, tuple(shapes.values()))
        graph = self.graphs.get(key)
        if graph is None:
            self.graphs[key] = self._capture(profile, shapes)
            if len(self.graphs) > self._most_graphs:
                self.graphs.popitem(last=False)
        else:
            self.graphs.move_to_end(key)
            graph.replay()

    def _capture(self, profile: int, shapes: Shapes) -> Graph:
        """Runs the step, and records it: TensorRT wants a run in these shapes first, and recording runs nothing."""
        context = self._make(profile)
        context.shape(shapes)
        context.enqueue()
        return Graph(context, self._device.capture(context.enqueue))

    def _make(self, profile: int) -> EngineContext:
        context = self._engine.create_context(profile)
        context.bind(self._tensors[profile])
        context.shape(self._shapes)
        return context
