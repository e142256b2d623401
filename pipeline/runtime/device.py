"""What a runner of engines needs of a GPU, through torch: memory, one stream, copies to it, captured graphs.

Everything that touches CUDA without TensorRT is here and nowhere else, so that the rest runs in tests on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.errors import CompatibilityError
from pipeline.progress import format_amount

if TYPE_CHECKING:
    import torch


class Device(Protocol):
    """name, sm: of the GPU; sm is 80 for compute capability 8.0. stream: CUDA's handle of the stream that all runs
    on, as TensorRT takes it."""

    name: str
    sm: int
    stream: int

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and that there are."""

    def allocate(self, shape: tuple[int, ...], dtype: str, what: str) -> torch.Tensor:
        """Zeros on the device. Raises CompatibilityError, naming `what` and the numbers, where memory is short."""

    def allocate_host(self, count: int) -> torch.Tensor:
        """[count] int32 on the host, in memory that the device reads by itself."""

    def release(self) -> None:
        """Gives back what was freed, so that others than torch can have it."""

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Starts a copy from the host; the result waits until `source` may be written again."""

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """torch's work inside goes to the stream, after what the caller started before, and before what it starts
        afterwards."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records what `work` starts on the stream, without running it → runs it again."""


class CudaDevice:
    """torch's current GPU. Not yet run on hardware."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise CompatibilityError(
                f"torch {torch.__version__} sees no GPU, and an engine runs on one",
                hint="check the driver with nvidia-smi, and that torch was built for CUDA",
            )
        self._torch: Any = torch  # whose CUDA classes have no types
        major, minor = torch.cuda.get_device_capability()
        self.name, self.sm = torch.cuda.get_device_name(), 10 * major + minor
        self._stream = self._torch.cuda.Stream()
        self.stream = int(self._stream.cuda_stream)

    def memory(self) -> tuple[int, int]:
        free, total = self._torch.cuda.mem_get_info()
        return int(free), int(total)

    def allocate(self, shape: tuple[int, ...], dtype: str, what: str) -> torch.Tensor:
        import torch

        try:
            with self.scope():
                made: torch.Tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")
                return made
        except torch.OutOfMemoryError:
            nbytes = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            raise short_of_memory(self, what, nbytes) from None

    def allocate_host(self, count: int) -> torch.Tensor:
        made: torch.Tensor = self._torch.zeros(count, dtype=self._torch.int32, pin_memory=True)
        return made

    def release(self) -> None:
        self._torch.cuda.synchronize()
        self._torch.cuda.empty_cache()

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        with self._torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = self._torch.cuda.Event()
        done.record(self._stream)
        wait: Callable[[], None] = done.synchronize
        return wait

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        caller = self._torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        try:
            with self._torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph: Any = self._torch.cuda.CUDAGraph()
        # "thread_local": another thread's allocations must not break the recording.
        with self._torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay


def short_of_memory(device: Device, what: str, nbytes: int) -> CompatibilityError:
    free, total = device.memory()
    return CompatibilityError(
        f"{what} needs {format_amount(nbytes, 'B')} of {device.name}'s memory: {format_amount(free, 'B')} of "
        f"{format_amount(total, 'B')} are free",
        hint="end what else runs on the GPU, or build for fewer or shorter sequences (stages.build)",
    )
