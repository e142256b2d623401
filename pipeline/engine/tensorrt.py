"""TensorRT proper (11 and later): compiles on the GPU that will serve, for that GPU. Not yet run on hardware."""

from __future__ import annotations

import ctypes
from typing import Any

from pipeline.errors import BuildError

HAS_READABLE_FILES = False
MINIMUM_VERSION = 11
# CUdevice_attribute of cuda.h
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76
_ELSEWHERE = "build on a host with that GPU and `pip install trtseek[tensorrt]`, or take backend: tensorrt_rtx"


def load() -> Any:
    try:
        import tensorrt
    except ImportError as error:
        raise BuildError(f"TensorRT cannot be imported: {error}", hint=_ELSEWHERE) from error
    if int(tensorrt.__version__.split(".")[0]) < MINIMUM_VERSION:
        raise BuildError(
            f"TensorRT {tensorrt.__version__} is installed, but the network needs {MINIMUM_VERSION} or later",
            hint="pip install 'trtseek[tensorrt]'",
        )
    return tensorrt


def check_target(sm: int) -> None:
    load()
    present = list_device_sms()
    if sm not in present:
        found = ", ".join(f"SM{s}" for s in sorted(set(present))) or "none"
        raise BuildError(
            f"TensorRT builds only for a GPU of this machine; SM{sm} is not among them (found: {found})",
            hint=_ELSEWHERE,
        )


def set_target(trt: Any, config: Any, sm: int) -> None:
    """Nothing to set: TensorRT compiles for the current GPU."""


def list_device_sms() -> list[int]:
    """Compute capabilities of the GPUs that the CUDA driver offers, 90 for 9.0; none without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    sms = []
    for device in range(count.value):
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, device)
        sms.append(10 * major.value + minor.value)
    return sms
