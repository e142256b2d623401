"""Loads PTX, starts kernels and reads what they count, through CUDA's driver API: no toolkit, no torch. Not yet run on
hardware.

Modules belong to a context, and are loaded when a kernel is first started in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeline.errors import CompatibilityError

# Of cuda.h.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_JIT_ERROR_LOG_BUFFER, _JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 5, 6
_STATIC_LIMIT = 48 << 10  # bytes of shared memory that a kernel may have without being asked for
_LOG_BYTES = 8192
# Triton ends every kernel's parameters with two of its own, for scratch memory that ours do not use.
TRAILING_POINTERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A kernel in PTX: its entry, threads of a program, bytes of shared memory."""

    ptx: bytes
    entry: str
    threads: int
    shared: int


class Driver:
    """`library` is libcuda, or what stands in for it in tests."""

    def __init__(self, library: Any) -> None:
        self._cuda = library
        self._loaded: dict[tuple[int, Function], ctypes.c_void_p] = {}

    def launch(self, function: Function, grid: tuple[int, int, int], arguments: Sequence[Any], stream: int) -> None:
        """Starts the kernel in the current context. arguments: ctypes values, in the order of its parameters. Raises
        CompatibilityError where the driver refuses its PTX or the launch."""
        values = [*arguments, *(ctypes.c_void_p(None) for _ in range(TRAILING_POINTERS))]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        handle = self._load(function)
        self._check(
            self._cuda.cuLaunchKernel(
                handle, *grid, function.threads, 1, 1, function.shared, ctypes.c_void_p(stream), pointers, None
            ),
            f"kernel {function.entry} cannot be started over {grid}",
        )

    def read_integers(self, address: int, count: int, stream: int) -> list[int]:
        """int32 numbers from the GPU, when all that the stream was given before is done."""
        numbers, handle = (ctypes.c_int32 * count)(), ctypes.c_void_p(stream)
        where, size = ctypes.c_uint64(address), ctypes.c_size_t(ctypes.sizeof(numbers))
        problem = f"{count} numbers cannot be read from the GPU"
        self._check(self._cuda.cuMemcpyDtoHAsync_v2(numbers, where, size, handle), problem)
        self._check(self._cuda.cuStreamSynchronize(handle), problem)
        return list(numbers)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Bytes, from one place on the GPU to another."""
        where, from_where = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._check(
            self._cuda.cuMemcpyDtoDAsync_v2(where, from_where, ctypes.c_size_t(size), ctypes.c_void_p(stream)),
            f"{size} bytes cannot be copied on the GPU",
        )

    def _load(self, function: Function) -> ctypes.c_void_p:
        context = ctypes.c_void_p()
        self._check(self._cuda.cuCtxGetCurrent(ctypes.byref(context)), "there is no CUDA context")
        key = (context.value or 0, function)
        if key not in self._loaded:
            self._loaded[key] = self._load_anew(function)
        return self._loaded[key]

    def _load_anew(self, function: Function) -> ctypes.c_void_p:
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 2)(_JIT_ERROR_LOG_BUFFER, _JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
        settings = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        status = self._cuda.cuModuleLoadDataEx(
            ctypes.byref(module), ctypes.c_char_p(function.ptx), 2, options, settings
        )
        said = log.value.decode(errors="replace").strip()
        self._check(status, f"the driver refuses kernel {function.entry}{': ' if said else ''}{said}")
        self._check(
            self._cuda.cuModuleGetFunction(ctypes.byref(handle), module, function.entry.encode()),
            f"the PTX has no kernel {function.entry}",
        )
        if function.shared > _STATIC_LIMIT:
            self._check(
                self._cuda.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_SIZE_BYTES, function.shared),
                f"kernel {function.entry} needs {function.shared} bytes of shared memory",
            )
        return handle

    def _check(self, status: int, problem: str) -> None:
        if status:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(status, ctypes.byref(name))
            said = (name.value or b"").decode() or f"error {status}"
            raise CompatibilityError(
                f"{problem} ({said})",
                hint="take a driver of CUDA 12.8 or later, and an engine for this GPU; or build with lowering: native",
            )


@cache
def open_driver() -> Driver:
    """Raises CompatibilityError without an NVIDIA driver."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise CompatibilityError(
            f"kernels of plugins need NVIDIA's driver: {error}", hint="run the engine on a host with a GPU"
        ) from None


@cache
def find_sm() -> int:
    """Compute capability of the current context's GPU, 90 for 9.0."""
    cuda: Any = ctypes.CDLL("libcuda.so.1")
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    cuda.cuCtxGetDevice(ctypes.byref(device))
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return 10 * major.value + minor.value
