"""TensorRT and a GPU, played on the CPU: an engine that runs the network's own program in the interpreter, from the
memory at the addresses that were bound and in the shapes that were set.

A wrong address, shape, padding or profile gives wrong logits here, as it would there; what TensorRT refuses or leaves
undefined (shapes outside the profile, memory that is not the device's, a pool whose update lies elsewhere, a context
changed after a graph was captured from it) is refused here.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorrt_rtx
import torch

from pipeline.engine.description import (
    BuildRecord,
    EngineDescription,
    ProfileDescription,
    ShapeRange,
    TensorDescription,
)
from pipeline.engine.limits import BuildLimits
from pipeline.interpreter.interpreter import Interpreter
from pipeline.network import inputs as ports
from pipeline.network.program import Program, TensorSpec
from tests.network.models import Model

STREAM = 4711
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def describe(
    model: Model, limits: BuildLimits, network: Mapping[str, Any] | None = None, **changes: Any
) -> EngineDescription:
    """engine.json of an engine that was not built, of a network with these options."""
    spec = model.spec(block_size=limits.block_size, max_seq_len=limits.max_seq_len, **network or {})
    inputs = ports.network_inputs(model.architecture, spec)
    profiles = tuple(
        ProfileDescription(
            name=profile.name,
            phase=profile.phase,
            shapes={
                name: ShapeRange(minimum=least, optimum=best, maximum=most)
                for name, (least, best, most) in profile.shapes(inputs).items()
            },
            workspace_bytes=1000,
            kernels={},
        )
        for profile in limits.profiles()
    )
    description = EngineDescription(
        file="model.engine",
        nbytes=6,
        digest="",
        backend="tensorrt_rtx",
        backend_version=tensorrt_rtx.__version__,
        sm=80,
        network_digest="",
        spec=spec,
        limits=limits,
        inputs=tuple(TensorDescription(name=p.name, dtype=p.dtype, shape=p.shape) for p in inputs),
        outputs=tuple(
            TensorDescription(name=p.name, dtype=p.dtype, shape=p.shape)
            for p in ports.network_outputs(model.architecture, spec)
        ),
        profiles=profiles,
        weights_bytes=5000,
        sources={},
        build=BuildRecord(seconds=1, peak_bytes=1, peak_anonymous_bytes=1),
    )
    return replace(description, **changes)


class HostDevice:
    """A `Device` whose memory is the host's. free: bytes that it says are free, less those allocated."""

    def __init__(self, free: int = 1 << 30, sm: int = 80) -> None:
        self.name, self.sm, self.stream = "a stand-in", sm, STREAM
        self.free = free
        self.allocated: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.recorded: list[Callable[[], None]] | None = None
        self.uploads = self.captures = self.replays = 0
        self._depth = 0

    def memory(self) -> tuple[int, int]:
        return self.free - sum(tensor.nbytes for tensor in self.allocated), self.free

    def allocate(self, shape: tuple[int, ...], dtype: str, what: str) -> torch.Tensor:
        from pipeline.runtime.device import short_of_memory

        tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
        if tensor.nbytes > self.memory()[0]:
            raise short_of_memory(self, what, tensor.nbytes)
        self.allocated.add(tensor)
        return tensor

    def allocate_host(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def release(self) -> None:
        pass

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        assert self._depth and self.recorded is None
        self.uploads += 1
        target.copy_(source)
        return lambda: None

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        self._depth += 1
        yield
        self._depth -= 1

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded = recorded = []
        work()
        self.recorded = None
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            for operation in recorded:
                operation()

        return replay

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The device's memory at an address."""
        nbytes = math.prod(shape) * dtype.itemsize
        inside = (t.data_ptr() <= address and address + nbytes <= t.data_ptr() + t.nbytes for t in self.allocated)
        assert any(inside), "no memory of the device"
        return torch.frombuffer((ctypes.c_byte * nbytes).from_address(address), dtype=dtype).view(shape)


class StandIn:
    """The module. What is not played here is the real one's: enumerations and the logger. `rtx`: whether it is
    TensorRT-RTX, or TensorRT, which captures no graphs by itself. `broken`: engine calls that fail, by name."""

    def __init__(self, program: Program, description: EngineDescription, device: HostDevice, *, rtx: bool) -> None:
        self.program, self.description, self.device, self.rtx = program, description, device, rtx
        self.interpreter = Interpreter(program, mode="exact")
        self.contexts: list[ExecutionContext] = []
        self.validity: tuple[Any, int] = (tensorrt_rtx.EngineValidity.VALID, 0)
        self.broken: set[str] = set()
        self.runtime_class = Runtime if rtx else PlainRuntime

    def __getattr__(self, name: str) -> Any:
        if name == "CudaGraphStrategy" and not self.rtx:
            raise AttributeError(name)
        return getattr(tensorrt_rtx, name)

    def Runtime(self, logger: Any) -> PlainRuntime:  # noqa: N802 (TensorRT's name)
        return self.runtime_class(self, logger)


class PlainRuntime:
    def __init__(self, module: StandIn, logger: Any) -> None:
        self._module, self._logger = module, logger

    def deserialize_cuda_engine(self, data: Any) -> CudaEngine | None:
        if bytes(data) != b"engine":
            self._logger.log(tensorrt_rtx.ILogger.Severity.ERROR, "Serialization assertion failed")
            return None
        return CudaEngine(self._module, self._logger)


class Runtime(PlainRuntime):
    def get_engine_validity(self, data: Any) -> tuple[Any, int]:
        return self._module.validity


class CudaEngine:
    device_memory_size_v2 = 4096
    streamable_weights_size = 4000

    def __init__(self, module: StandIn, logger: Any) -> None:
        self.module, self.logger = module, logger
        self.names = [tensor.name for tensor in (*module.program.inputs, *module.program.outputs)]
        self.num_io_tensors, self.num_optimization_profiles = len(self.names), len(module.description.profiles)
        self.weight_streaming_budget_v2 = self.streamable_weights_size

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        shapes = self.module.description.profiles[profile].shapes[name]
        return [shapes.minimum, shapes.optimum, shapes.maximum]

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, how: Any) -> ExecutionContext | None:
        if "create_execution_context" in self.module.broken:
            self.logger.log(tensorrt_rtx.ILogger.Severity.ERROR, "out of memory")
            return None
        config = how if isinstance(how, RuntimeConfig) else None
        strategy = config.strategy if config else how
        assert strategy == tensorrt_rtx.ExecutionContextAllocationStrategy.USER_MANAGED
        context = ExecutionContext(self, config)
        self.module.contexts.append(context)
        return context


class RuntimeConfig:
    strategy: Any = None
    cuda_graph_strategy: Any = None
    dynamic_shapes_kernel_specialization_strategy: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy


class ExecutionContext:
    def __init__(self, engine: CudaEngine, config: RuntimeConfig | None) -> None:
        self.engine, self.config = engine, config
        self.profile = self.memory = None
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.runs = 0
        self.communicator: int | None = None

    def set_communicator(self, capsule: Any) -> bool:
        if "set_communicator" in self.engine.module.broken:
            self.engine.logger.log(tensorrt_rtx.ILogger.Severity.ERROR, "NCCL is not found")
            return False
        read = ctypes.pythonapi.PyCapsule_GetPointer
        read.restype, read.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        self.communicator = read(capsule, None)
        return True

    def set_device_memory(self, address: int, nbytes: int) -> None:
        assert nbytes >= self.engine.device_memory_size_v2
        self.engine.module.device.view(address, (nbytes,), torch.uint8)
        self.memory = address

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream == STREAM
        self.profile, self.shapes = profile, {}
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name in self.engine.names

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """As TensorRT does: nothing is taken that the profile does not hold."""
        assert self.profile is not None
        held = self.engine.module.description.profiles[self.profile].shapes[name]
        fits = len(shape) == len(held.minimum) and all(
            least <= size <= most for least, size, most in zip(held.minimum, shape, held.maximum, strict=True)
        )
        if fits:
            self.shapes[name] = tuple(shape)
        else:
            self.engine.logger.log(tensorrt_rtx.ILogger.Severity.ERROR, f"{name}: static dimension mismatch")
        return fits

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == STREAM and self.memory is not None and self.profile is not None
        module = self.engine.module
        if "execute_async_v3" in module.broken:
            self.engine.logger.log(tensorrt_rtx.ILogger.Severity.ERROR, "an illegal memory access was encountered")
            return False
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        if module.device.recorded is None:
            self.run(shapes, addresses)
            return True
        assert self.runs, "TensorRT wants a run before a capture"

        def replay() -> None:
            assert (self.shapes, self.addresses) == (shapes, addresses), "the context is not what was captured"
            self.run(shapes, addresses)

        module.device.recorded.append(replay)
        return True

    def run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        module = self.engine.module

        def view(spec: TensorSpec, shape: tuple[int, ...]) -> torch.Tensor:
            return module.device.view(addresses[spec.name], shape, DTYPES[spec.dtype])

        feeds = {spec.name: view(spec, shapes[spec.name]) for spec in module.program.inputs}
        results = module.interpreter.run(feeds)
        for spec in module.program.outputs:
            if spec.name.endswith(ports.POOL_OUTPUT_SUFFIX):
                assert addresses[spec.name] == addresses[spec.name.removesuffix(ports.POOL_OUTPUT_SUFFIX)]
            else:
                view(spec, tuple(results[spec.name].shape)).copy_(results[spec.name])
        self.runs += 1


def load(model: Model, program: Program, limits: BuildLimits, folder: Path, *, rtx: bool = True, **network: Any) -> Any:
    """The runner of an engine of this network, which has these options. Typed as whatever the caller takes it for."""
    from pipeline.runtime.engine_runner import EngineRunner

    device, description = HostDevice(), describe(model, limits, network)
    (folder / "model.engine").write_bytes(b"engine")
    module = StandIn(program, description, device, rtx=rtx)
    return EngineRunner(folder / "model.engine", description, trt=module, device=device)
