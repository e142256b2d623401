"""Runs a program on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pipeline.interpreter.compiler import compile_plan
from pipeline.interpreter.constants import Constants
from pipeline.interpreter.errors import FeedError
from pipeline.interpreter.fusion import fuse
from pipeline.interpreter.graph import Graph, drop_unused, updates
from pipeline.interpreter.numerics import Mode, Numerics
from pipeline.interpreter.plan import Plan, execute

if TYPE_CHECKING:
    from pipeline.network.program import Program, TensorSpec


class Interpreter:
    """A program, compiled once, in one of the modes of numerics.py.

    optimize: fuse and merge operations. Off, every node runs by itself: the same values, more slowly.
    resident_bytes: how much prepared weights (widened, dequantized, packed) may hold; what does not fit is prepared at
        each use, so that a network larger than memory runs layer by layer. None: no limit.
    """

    def __init__(
        self, program: Program, *, mode: Mode, optimize: bool = True, resident_bytes: int | None = None
    ) -> None:
        self.program = program
        self.numerics = Numerics(mode)
        self._optimize = optimize
        self._constants = Constants(program, self.numerics, resident_bytes)
        self._names = program.tensors.keys()
        self._plans: dict[frozenset[str], Plan] = {}
        caches = {node.inputs[index] for node in program.nodes for index in updates(node)}
        self._feeds = tuple(
            (spec, self.numerics.held(spec.dtype), len(spec.shape), spec.name in caches) for spec in program.inputs
        )
        self._known: dict[str, weakref.ref[torch.Tensor]] = {}
        self._plan(frozenset())

    def run(self, feeds: Mapping[str, torch.Tensor], *, taps: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        """Every output by name, and every tensor named in `taps`. A cache among the feeds is updated in place, and is
        what its output returns. Tensors are in the types of the mode. Raises FeedError for an input that is missing or
        does not fit, ExecutionError where a layer cannot compute."""
        plan = self._plan(frozenset(taps))
        values = list(plan.template)
        for spec, held, rank, is_cache in self._feeds:
            tensor = feeds.get(spec.name)
            if is_cache and tensor is not None and self._is_known(spec.name, tensor):
                values[plan.inputs[spec.name]] = tensor
                continue
            if (
                tensor is None
                or tensor.dim() != rank
                or tensor.is_floating_point() != held.is_floating_point
                or (is_cache and (tensor.dtype != held or not tensor.is_contiguous()))
            ):
                raise self._misfit(spec, tensor)
            for size, declared in zip(tensor.shape, spec.shape, strict=True):
                if declared not in (-1, size):
                    raise self._misfit(spec, tensor)
            values[plan.inputs[spec.name]] = tensor if tensor.dtype == held else tensor.to(held)
            if is_cache:
                self._known[spec.name] = weakref.ref(tensor)
        if len(feeds) > len(self._feeds):
            known = {spec.name for spec, *_ in self._feeds}
            raise FeedError(f"unknown inputs {', '.join(sorted(feeds.keys() - known))}")
        with torch.inference_mode():
            execute(plan.steps, values)
        return {name: values[slot] for name, slot in plan.outputs.items()}

    def _is_known(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether this very cache was looked at in an earlier run: there are two in each layer, at every step."""
        known = self._known.get(name)
        return known is not None and known() is tensor

    @property
    def prepared_bytes(self) -> int:
        """What prepared weights hold now."""
        return self._constants.prepared_bytes

    def _plan(self, taps: frozenset[str]) -> Plan:
        """The plan that keeps these tensors; compiled when first asked for."""
        if taps not in self._plans:
            if unknown := taps - self._names:
                raise FeedError(f"the network has no tensors {', '.join(sorted(unknown))}")
            graph = drop_unused(Graph.of(self.program, taps))
            if self._optimize:
                graph = fuse(graph, self.numerics)
            names = tuple(spec.name for spec in self.program.inputs)
            self._plans[taps] = compile_plan(graph, names, self.numerics, self._constants)
        return self._plans[taps]

    def _misfit(self, spec: TensorSpec, tensor: torch.Tensor | None) -> FeedError:
        held = str(self.numerics.held(spec.dtype)).removeprefix("torch.")
        wanted = f"{held} {list(spec.shape)} in {self.numerics.mode} mode"
        given = "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        return FeedError(f"input {spec.name} is {given}, not {wanted}", hint="see pipeline/network/inputs.py")
