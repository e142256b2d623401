"""An engine loaded by TensorRT: refused early where it cannot run here, its contexts sharing one block of memory.

The module (`tensorrt_rtx` or `tensorrt`) is a parameter: nothing here imports it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engine.description import EngineDescription
from pipeline.engine.limits import STRIPPED
from pipeline.errors import CompatibilityError, spell_reason
from pipeline.progress import format_amount
from pipeline.runtime.device import Device, short_of_memory
from pipeline.runtime.errors import RunnerError
from pipeline.runtime.profiles import GENERATION

if TYPE_CHECKING:
    import torch

REBUILD = "build the engine again, with the TensorRT and for the GPU that will serve it"


class LoadedEngine:
    """description: what stands beside the engine file. weights_fraction: of the weights that can stay in host memory,
    how much goes to the GPU; below 1 only for engines built with weight streaming. communicator: NCCL's, as an address,
    of the ranks that the engine exchanges with.

    Raises CompatibilityError, with the reason, for an engine that this GPU, this TensorRT or this much memory cannot
    run.
    """

    def __init__(
        self,
        path: Path,
        description: EngineDescription,
        trt: Any,
        device: Device,
        *,
        weights_fraction: float = 1.0,
        communicator: int | None = None,
    ) -> None:
        self.description, self.device = description, device
        self._trt, self._communicator = trt, communicator
        self._messages: deque[str] = deque(maxlen=8)
        self._logger = _make_logger(trt, self._messages)
        self._check(weights_fraction)
        self._engine = self._deserialize(path)
        self._check_contents(path)
        if description.weight_streaming:
            self._stream_weights(weights_fraction)
        nbytes = int(self._engine.device_memory_size_v2)
        self.workspace = device.allocate((max(nbytes, 1),), "uint8", f"the workspace of {path.name}")

    def create_context(self, profile: int) -> EngineContext:
        """An execution context for one profile. All share the workspace: only one may run at a time."""
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self.captures_itself:
            phase = self.description.profiles[profile].phase
            config = self._engine.create_runtime_config()
            config = _configure(self._trt, config, strategy, phase, captures=self.capturable)
            context = self._engine.create_execution_context(config)
        else:
            context = self._engine.create_execution_context(strategy)
        if context is None:
            raise CompatibilityError(self._say(f"TensorRT makes no execution context for profile {profile}"))
        context.set_device_memory(self.workspace.data_ptr(), self.workspace.numel())
        # Waits until every rank has come: all make the same contexts, in the same order.
        if self._communicator is not None and not context.set_communicator(_make_capsule(self._communicator)):
            raise RunnerError(self._say("TensorRT takes no communicator"))
        if not context.set_optimization_profile_async(profile, self.device.stream):
            raise RunnerError(self._say(f"TensorRT refuses profile {profile}"))
        return EngineContext(context, self)

    @property
    def captures_itself(self) -> bool:
        """Whether this TensorRT captures CUDA graphs by itself, as TensorRT-RTX does: once its kernels for a shape are
        compiled. A graph captured around it would go on running the generic ones."""
        return hasattr(self._trt, "CudaGraphStrategy")

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold its steps: not where a plugin has the host read what it counted, nor those of
        several ranks, which would have to be captured together."""
        from plugins.registry import find_class

        counts = any(find_class(plugin.operation).EXCHANGES for plugin in self.description.plugins)
        return self._communicator is None and not counts

    def refuse(self, problem: str) -> RunnerError:
        return RunnerError(self._say(problem))

    def _say(self, problem: str) -> str:
        """With what TensorRT said about it."""
        said = f": {self._messages[-1]}" if self._messages else ""
        self._messages.clear()
        return problem + said

    def _check(self, weights_fraction: float) -> None:
        description, device, trt = self.description, self.device, self._trt
        if description.weights == STRIPPED:
            raise CompatibilityError(
                f"{description.file} was built without its weights", hint="`trtseek refit` gives it a checkpoint's"
            )
        if device.sm != description.sm:
            raise CompatibilityError(
                f"{description.file} is for SM{description.sm}, and {device.name} is SM{device.sm}", hint=REBUILD
            )
        if trt.__version__ != description.backend_version:
            raise CompatibilityError(
                f"{description.file} was built by {description.backend} {description.backend_version}; "
                f"{trt.__version__} is installed, and engines are tied to their version",
                hint=f"{REBUILD}, or install that version",
            )
        if not 0 <= weights_fraction <= 1:
            raise CompatibilityError(f"weights_fraction is {weights_fraction}", hint="give a share from 0 to 1")
        if weights_fraction < 1 and not description.weight_streaming:
            raise CompatibilityError(
                f"{description.file} cannot leave weights in host memory",
                hint="build it with stages.build.weight_streaming: true",
            )
        if description.weights_bytes is not None and description.workspace_bytes is not None:
            share = weights_fraction if description.weight_streaming else 1.0
            needed = int(share * description.weights_bytes) + description.workspace_bytes
            if needed > device.memory()[0]:
                raise short_of_memory(device, f"{description.file}, weights and workspace,", needed)

    def _deserialize(self, path: Path) -> Any:
        runtime = self._trt.Runtime(self._logger)
        if self.description.spec.lowering.plugins():
            from plugins.tensorrt_plugin import register_plugins

            register_plugins(self._trt)  # an engine finds its plugins among those that are known when it is loaded
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if hasattr(runtime, "get_engine_validity"):  # TensorRT-RTX's
                    validity, bits = runtime.get_engine_validity(data)
                    if validity == self._trt.EngineValidity.INVALID:
                        raise CompatibilityError(
                            f"{path} is not valid here: {_name_diagnostics(self._trt, bits)}", hint=REBUILD
                        )
                engine = runtime.deserialize_cuda_engine(data)
        except (OSError, ValueError) as error:
            raise CompatibilityError(
                f"{path} cannot be read: {spell_reason(error)}", hint="copy the package again"
            ) from None
        if engine is None:
            free, total = self.device.memory()
            raise CompatibilityError(
                self._say(f"{path} cannot be loaded on {self.device.name}"),
                hint=f"{format_amount(free, 'B')} of {format_amount(total, 'B')} of its memory are free; {REBUILD}",
            )
        return engine

    def _check_contents(self, path: Path) -> None:
        """Raises CompatibilityError where the engine is not the one that is described."""
        engine, described = self._engine, self.description
        found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
        wanted = {tensor.name for tensor in (*described.inputs, *described.outputs)}
        problem = ""
        if found != wanted:
            problem = f"its inputs and outputs differ: {', '.join(sorted(found ^ wanted))}"
        elif engine.num_optimization_profiles != len(described.profiles):
            problem = f"it has {engine.num_optimization_profiles} profiles, not {len(described.profiles)}"
        else:
            for index, profile in enumerate(described.profiles):
                for name, shapes in profile.shapes.items():
                    stated = (shapes.minimum, shapes.optimum, shapes.maximum)
                    if tuple(map(tuple, engine.get_tensor_profile_shape(name, index))) != stated:
                        problem = f"input {name} has other sizes in profile {profile.name}"
        if problem:
            raise CompatibilityError(f"{path} is not the engine that engine.json describes: {problem}", hint=REBUILD)

    def _stream_weights(self, fraction: float) -> None:
        budget = int(fraction * self._engine.streamable_weights_size)
        self._engine.weight_streaming_budget_v2 = budget
        if self._engine.weight_streaming_budget_v2 != budget:
            raise CompatibilityError(
                self._say(f"TensorRT does not keep {format_amount(budget, 'B')} of weights on the GPU"),
                hint="ask for a smaller share",
            )


class EngineContext:
    """One execution context: addresses are bound once, shapes whenever they change."""

    def __init__(self, context: Any, engine: LoadedEngine) -> None:
        self._context, self._engine = context, engine
        self._shapes: dict[str, tuple[int, ...]] = {}

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inputs and outputs by name; the memory must live as long as the context."""
        for name, tensor in tensors.items():
            if not self._context.set_tensor_address(name, tensor.data_ptr()):
                raise self._engine.refuse(f"TensorRT takes no address for {name}")

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Sets the shapes of inputs; those of before stay."""
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                if not self._context.set_input_shape(name, shape):
                    self._shapes.pop(name, None)
                    raise self._engine.refuse(f"TensorRT takes no shape {list(shape)} for {name}")
                self._shapes[name] = shape

    def enqueue(self) -> None:
        if not self._context.execute_async_v3(self._engine.device.stream):
            raise self._engine.refuse("TensorRT failed to run a step")


def _make_capsule(address: int) -> Any:
    """A pointer, as TensorRT's bindings take one."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, None, None)


def _make_logger(trt: Any, messages: deque[str]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                messages.append(message)

    return Logger()


def _configure(trt: Any, config: Any, strategy: Any, phase: str, *, captures: bool) -> Any:
    """TensorRT-RTX's settings. Generation steps come in few shapes, each worth kernels of its own and a graph; those of
    context steps hardly come again, and stay with the kernels for any shape."""
    kernels, graphs = trt.DynamicShapesKernelSpecializationStrategy, trt.CudaGraphStrategy
    generation = phase == GENERATION
    config.set_execution_context_allocation_strategy(strategy)
    config.dynamic_shapes_kernel_specialization_strategy = kernels.LAZY if generation else kernels.NONE
    config.cuda_graph_strategy = graphs.WHOLE_GRAPH_CAPTURE if generation and captures else graphs.DISABLED
    return config


def _name_diagnostics(trt: Any, bits: int) -> str:
    names = [name for name, member in trt.EngineInvalidityDiagnostics.__members__.items() if int(member) & int(bits)]
    return ", ".join(name.lower().replace("_", " ") for name in names) or "no reason given"
