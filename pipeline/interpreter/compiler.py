"""Compiles a graph to a plan: picks each node's kernel, and decides what is a constant, what a tuple of integers, what
is made anew at each run, and when each tensor is let go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pipeline.interpreter import integers
from pipeline.interpreter.graph import Graph, updates
from pipeline.interpreter.operations import OPERATIONS, PLUGIN, Kernel, Operation, Site
from pipeline.interpreter.plan import NOTHING, Plan, Step, bind
from pipeline.interpreter.tape import join_native
from plugins.registry import OPERATIONS as PLUGINS
from plugins.registry import find_class

if TYPE_CHECKING:
    from pipeline.interpreter.constants import Constants
    from pipeline.interpreter.numerics import Numerics
    from pipeline.network.program import Node

# Kinds that work on each entry of a stack [E, …] by itself, when all inputs are such stacks.
ENTRYWISE = frozenset({"cast", "dequantize"})


def compile_plan(graph: Graph, inputs: tuple[str, ...], numerics: Numerics, constants: Constants) -> Plan:
    """Raises UnsupportedLayerError for a kind or attribute that no operation executes."""
    return _Compiler(graph, inputs, numerics, constants).compile()


class _Compiler:
    def __init__(self, graph: Graph, inputs: tuple[str, ...], numerics: Numerics, constants: Constants) -> None:
        self.graph, self.numerics, self.constants = graph, numerics, constants
        self.template: list[Any] = [None]
        self.slots: dict[tuple[str, str], int] = {}  # (tensor, form): a form is "plain", "integers" or "stored"
        self.steps: list[Step] = []
        self.inputs = {name: self.slot(name, "plain") for name in inputs}
        self.known: dict[str, integers.Ints] = {}  # tensors that are Python integers already now
        self.integer: set[str] = set()  # tensors that are Python integers at run time
        self.foldable: set[str] = set()  # tensors that depend on constants only
        self.resident: dict[str, bool] = {}  # which of them are kept: decided once, while there is room
        for name in graph.constants:
            spec = graph.specs[name]
            self.foldable.add(name)
            if integers.is_small(spec) and (not spec.shape or spec.shape[0] <= integers.LARGEST):
                self.known[name] = tuple(constants.load(name).reshape(-1).tolist())

    def compile(self) -> Plan:
        for node in self.graph.nodes:
            self.add(node)
        outputs = {name: self.read(name, "plain", name) for name in self.graph.wanted}
        last: dict[int, int] = {}
        for index, step in enumerate(self.steps):
            last.update(dict.fromkeys((*step.reads, *step.writes), index))
        keep = {*outputs.values(), NOTHING, *(slot for slot, value in enumerate(self.template) if value is not None)}
        done: dict[int, list[int]] = {}
        for slot, index in last.items():
            if slot not in keep:
                done.setdefault(index, []).append(slot)
        steps = [replace(step, done=tuple(done.get(index, ()))) for index, step in enumerate(self.steps)]
        plan = Plan(
            template=tuple(self.template),
            inputs=self.inputs,
            outputs=outputs,
            steps=tuple(join_native(steps, self.template, {*outputs.values()})),
        )
        # Kernels ask for constants through this compiler; held by it, they and it would outlive the plan.
        self.steps, self.template = [], []
        return plan

    def add(self, node: Node) -> None:
        names = [name for name in node.inputs if name is not None]
        outputs = [spec.name for spec in node.outputs]
        as_integers = all(name in self.known or name in self.integer for name in names)
        if integers.stays_integer(node, as_integers):
            kernel = integers.compile_integer(self.site(node))
            if node.kind != "shape" and all(name in self.known for name in names):
                self.known[outputs[0]] = kernel(*[self.known.get(str(name)) for name in node.inputs])
                return
            self.integer.add(outputs[0])
            form = "plain" if node.kind == "shape" else "integers"
            reads = tuple(self.read(name, form, node.name) for name in node.inputs)
            self.push(kernel, reads, (self.slot(outputs[0], "integers"),), node.name)
        elif not updates(node) and names and all(name in self.foldable or name in self.known for name in names):
            self.foldable.update(outputs)  # computed when something asks for it
        else:
            self.push_node(node)

    def push_node(self, node: Node) -> None:
        operation = self.operation(node)
        site = self.site(node)
        kernel = operation.compile(site)
        reads = []
        for index, name in enumerate(node.inputs):
            absorbs = index in operation.absorbs
            if index in site.unread or (name and absorbs and (self.is_resident(name) or self.is_stack(name))):
                reads.append(NOTHING)
            elif name in self.graph.constants and index in operation.stored:
                reads.append(self.read(name, "stored", node.name))
            else:
                reads.append(self.read(name, "integers" if index in operation.integers else "plain", node.name))
        writes = tuple(self.slot(spec.name, "plain") for spec in node.outputs)
        self.push(kernel, tuple(reads), writes, node.name)

    def operation(self, node: Node) -> Operation:
        if node.kind not in OPERATIONS and node.kind not in PLUGINS:
            raise self.site(node).refuse("no such operation")
        if node.kind in OPERATIONS:
            return OPERATIONS[node.kind]
        return replace(PLUGIN, stored=find_class(node.kind).STORED)

    def site(self, node: Node) -> Site:
        def constant(index: int) -> torch.Tensor | None:
            name = node.inputs[index]
            return self.evaluate(name) if name is not None and self.is_resident(name) else None

        def prepare(index: int, form: str, nbytes: int, make: Callable[[], torch.Tensor]) -> torch.Tensor | None:
            name = str(node.inputs[index])
            free = form == "plain" and name in self.graph.constants and self.constants.is_free(name)
            if not free and not self.constants.keeps(name, nbytes):
                return None
            return self.constants.prepare(name, form, make, costs=not free)

        def parts(index: int) -> tuple[int, Callable[[int], torch.Tensor]] | None:
            name = str(node.inputs[index])
            if not self.is_stack(name):
                return None
            return self.graph.specs[name].shape[0], lambda entry: self.evaluate(name, entry)

        specs = tuple(None if name is None else self.graph.specs[name] for name in node.inputs)
        return Site(node=node, inputs=specs, numerics=self.numerics, constant=constant, parts=parts, prepare=prepare)

    def slot(self, name: str, form: str) -> int:
        if (name, form) not in self.slots:
            self.slots[name, form] = len(self.template)
            self.template.append(None)
        return self.slots[name, form]

    def read(self, name: str | None, form: str, layer: str) -> int:
        """The slot of a tensor in a form, with the step that makes it where none does yet."""
        if name is None:
            return NOTHING
        if (name, form) in self.slots:
            return self.slots[name, form]
        spec = self.graph.specs[name]
        held, shape = self.numerics.held(spec.dtype), () if not spec.shape else (-1,)
        if form == "stored":
            slot = self.slot(name, form)
            self.template[slot] = self.constants.stored(name)
        elif name in self.known:
            slot = self.slot(name, form)
            known = self.known[name]
            self.template[slot] = known if form == "integers" else torch.tensor(known, dtype=held).reshape(shape)
        elif name in self.integer:  # known to be wanted as a tensor: integer nodes fill the other form
            source, slot = self.slots[name, "integers"], self.slot(name, form)
            self.push(lambda values: torch.tensor(values, dtype=held).reshape(shape), (source,), (slot,), layer)
        elif form == "integers":
            source, slot = self.read(name, "plain", layer), self.slot(name, form)
            self.push(lambda tensor: tuple(tensor.reshape(-1).tolist()), (source,), (slot,), layer)
        else:
            slot = self.read_constant(name, layer)
        return slot

    def read_constant(self, name: str, layer: str) -> int:
        """A constant, or what depends on constants only: in the template, or made anew before its use."""
        slot = self.slot(name, "plain")
        if self.is_resident(name):
            free = name in self.graph.constants and self.constants.is_free(name)
            self.template[slot] = self.constants.prepare(name, "plain", lambda: self.evaluate(name), costs=not free)
        elif name in self.graph.constants:
            self.push(lambda: self.constants.load(name), (), (slot,), layer)
        else:
            del self.slots[name, "plain"]
            self.push_node(self.graph.makers[name])
        return self.slots[name, "plain"]

    def is_resident(self, name: str) -> bool:
        """Whether a tensor that depends on constants only is kept."""
        if name not in self.resident:
            spec = self.graph.specs[name]
            nbytes = torch.Size(spec.shape).numel() * self.numerics.held(spec.dtype).itemsize
            free = name in self.graph.constants and self.constants.is_free(name)
            depends = name in self.foldable or name in self.known
            self.resident[name] = depends and (free or self.constants.keeps(name, nbytes))
        return self.resident[name]

    def is_stack(self, name: str) -> bool:
        """Whether a tensor is a stack of matrices, each of which depends on the same entry of stacks of constants."""
        spec = self.graph.specs[name]
        if len(spec.shape) != 3 or name not in self.foldable:
            return False
        if name in self.graph.constants:
            return True
        node = self.graph.makers[name]
        sources = [source for source in node.inputs if source is not None]
        return node.kind in ENTRYWISE and all(
            self.is_stack(source) and self.graph.specs[source].shape[0] == spec.shape[0] for source in sources
        )

    def evaluate(self, name: str, entry: int | None = None) -> Any:
        """Computes a tensor that depends on constants only, or one entry of a stack ([1, …]), keeping nothing."""
        if name in self.known:
            spec = self.graph.specs[name]
            return torch.tensor(self.known[name], dtype=self.numerics.held(spec.dtype)).reshape(spec.shape)
        if name in self.graph.constants:
            return self.constants.load(name, entry)
        node = self.graph.makers[name]
        operation = self.operation(node)
        arguments: list[Any] = []
        for index, source in enumerate(node.inputs):
            value = None if source is None else self.evaluate(source, entry)
            arguments.append(tuple(value.tolist()) if value is not None and index in operation.integers else value)
        results = operation.compile(self.site(node))(*arguments)
        results = results if len(node.outputs) > 1 else (results,)
        return dict(zip((spec.name for spec in node.outputs), results, strict=True))[name]

    def push(self, kernel: Kernel, reads: tuple[int, ...], writes: tuple[int, ...], layer: str) -> None:
        run = bind(kernel, reads, writes)
        self.steps.append(Step(kernel=kernel, reads=reads, writes=writes, run=run, layers=(layer,)))
