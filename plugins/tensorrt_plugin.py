"""Operations as TensorRT sees them: one `IPluginV3` class for all, of `tensorrt_rtx` and of `tensorrt` alike.

Which module is a parameter, as everywhere. A plugin has two fields: "operation", its name, version and attributes, and
"kernels", what `carried` packs. The second is empty until `carry` fills it, so that a network that is only read back
compiles nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

from pipeline.errors import CompatibilityError
from plugins.carried import Carried, compile_carried
from plugins.driver import find_sm, open_driver
from plugins.nccl import find_group
from plugins.operation import Argument, Exchange, Input, Launch, Memory, Operation, Scratch, Size
from plugins.registry import OPERATIONS, read_operation
from plugins.transport import run_exchange

NAMESPACE = "trtseek"
VERSION = "1"  # of the fields
OPERATION, KERNELS = "operation", "kernels"
_SCALARS: dict[str, Callable[[Any], Any]] = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}


def make_plugin(trt: Any, operation: Operation) -> Any:
    """The plugin object for a network. Whoever adds it keeps a reference."""
    return _classes(trt)[0](operation, Carried({}))


def carry(plugins: Iterable[Any], sms: Iterable[int]) -> None:
    """Compiles what plugins of a network will serialize. Raises BuildError."""
    sms = tuple(sms)
    for plugin in plugins:
        plugin.carried = compile_carried(plugin.operation, sms)


@cache
def register_plugins(trt: Any) -> None:
    """Makes every operation known to TensorRT: before a skeleton is parsed, and before an engine is loaded."""
    registry = trt.get_plugin_registry()
    for name in OPERATIONS:
        creator = _classes(trt)[1](name)
        if not registry.register_creator(creator, NAMESPACE):
            raise CompatibilityError(f"TensorRT refuses plugin {name}", hint="is another library of that name loaded?")
        _KEPT.append(creator)


_KEPT: list[Any] = []  # the registry holds no reference of its own


@cache
def _classes(trt: Any) -> tuple[type, type]:
    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):  # type: ignore[misc]
        def __init__(self, operation: Operation, carried: Carried) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.operation, self.carried = operation, carried
            self.plugin_name, self.plugin_version, self.plugin_namespace = operation.NAME, VERSION, NAMESPACE
            self.num_outputs = len(operation.outputs())

        def get_capability_interface(self, _: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self.operation, self.carried)

        # The build

        def get_output_data_types(self, _: Any) -> list[Any]:
            return [getattr(trt, output.dtype) for output in self.operation.outputs()]

        def get_output_shapes(self, inputs: Any, _: Any, builder: Any) -> list[Any]:
            def size(dim: int | Size) -> Any:
                if not isinstance(dim, Size):
                    return builder.constant(dim)
                found = inputs[dim.input][dim.dim]
                if dim.times == 1:
                    return found
                return builder.operation(trt.DimensionOperation.PROD, found, builder.constant(dim.times))

            return [trt.DimsExprs([size(dim) for dim in output.shape]) for output in self.operation.outputs()]

        def supports_format_combination(self, position: int, tensors: Any, num_inputs: int) -> bool:
            types = [*self.operation.input_types(), *(output.dtype for output in self.operation.outputs())]
            described = tensors[position].desc
            return bool(described.format == trt.TensorFormat.LINEAR and described.type == getattr(trt, types[position]))

        def get_aliased_input(self, output: int) -> int:
            updates = self.operation.outputs()[output].updates
            return -1 if updates is None else updates

        def configure_plugin(self, *_: Any) -> None:
            pass

        def get_workspace_size(self, inputs: Any, _: Any) -> int:
            return self.operation.scratch_bytes([tuple(tensor.max) for tensor in inputs])

        def get_valid_tactics(self) -> list[int]:
            return []

        def get_fields_to_serialize(self) -> Any:
            return trt.PluginFieldCollection(
                [_field(trt, OPERATION, self.operation.to_json()), _field(trt, KERNELS, self.carried.to_json())]
            )

        # The run

        def set_tactic(self, _: int) -> None:
            pass

        def attach_to_context(self, _: Any) -> Any:
            return self.clone()

        def on_shape_change(self, *_: Any) -> None:
            pass

        def enqueue(self, described: Any, _: Any, inputs: Any, outputs: Any, workspace: int, stream: int) -> None:
            run_launches(
                self.operation, self.carried, [tuple(d.dims) for d in described], inputs, outputs, workspace, stream
            )

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = name, VERSION, NAMESPACE
            self.field_names = trt.PluginFieldCollection([_field(trt, key, "") for key in (OPERATION, KERNELS)])

        def create_plugin(self, _: str, fields: Any, __: Any) -> Any:
            # TensorRT ends a text with a zero, or not.
            texts = {field.name: bytes(field.data).decode().rstrip("\0") for field in fields}
            operation = read_operation(self.name, texts[OPERATION])
            return Plugin(operation, Carried.from_json(texts.get(KERNELS) or '{"kernels": []}'))

    return Plugin, Creator


@lru_cache(maxsize=4096)
def plan_launches(
    operation: Operation, shapes: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, Launch | Exchange], ...]:
    """The launches, each with its kernel's place in `kernels()`. Steps come in few shapes, and planning one in Python
    takes longer than starting it."""
    kernels = operation.kernels()
    return tuple(
        (kernels.index(step.kernel) if isinstance(step, Launch) else -1, step) for step in operation.launches(shapes)
    )


Locate = Callable[[Memory], int]  # the address of an operation's memory


def exchange_over_nccl(step: Exchange, locate: Locate, stream: int) -> None:
    """Raises CompatibilityError where the group is not connected."""
    counts: list[int] = []
    if step.counts is not None:
        counts = open_driver().read_integers(locate(step.counts), 2 * step.ranks, stream)
    group = find_group(step.first, step.ranks)
    run_exchange(step, group, locate(step.source), locate(step.target), counts, stream)


def run_launches(
    operation: Operation,
    carried: Carried,
    shapes: Sequence[tuple[int, ...]],
    inputs: Sequence[int],
    outputs: Sequence[int],
    workspace: int,
    stream: int,
    exchange: Callable[[Exchange, Locate, int], None] = exchange_over_nccl,
) -> None:
    """Starts what the operation plans for these shapes. inputs, outputs, workspace: device addresses."""

    def locate(memory: Memory) -> int:
        if isinstance(memory, Input):
            return inputs[memory.index]
        return workspace + memory.offset if isinstance(memory, Scratch) else outputs[memory.index] + memory.offset

    def value(argument: Argument, kind: str) -> Any:
        return ctypes.c_void_p(locate(argument)) if isinstance(argument, Memory) else _SCALARS[kind](argument)

    driver, sm = open_driver(), find_sm()
    for index, step in plan_launches(operation, tuple(shapes)):
        if isinstance(step, Exchange):
            exchange(step, locate, stream)
        else:
            pairs = zip(step.kernel.parameters, step.arguments, strict=True)
            arguments = [value(argument, kind) for (_, kind), argument in pairs]
            driver.launch(carried.find(operation.NAME, index, sm), step.grid, arguments, stream)


def _field(trt: Any, name: str, text: str) -> Any:
    return trt.PluginField(name, text.encode(), trt.PluginFieldType.CHAR)
