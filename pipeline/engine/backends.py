"""The TensorRT modules that can build the network, as one row each; what differs between them is in their modules."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from pipeline.errors import BuildError

# Name in the YAML -> module that satisfies Backend.
BACKENDS = {
    "tensorrt_rtx": "pipeline.engine.tensorrt_rtx",
    "tensorrt": "pipeline.engine.tensorrt",
}


class Backend(Protocol):
    """One build backend. `trt` is the imported TensorRT module."""

    HAS_READABLE_FILES: bool  # whether pipeline.engine.engine_file reads what it builds

    def load(self) -> Any:
        """Imports and returns the TensorRT module. Raises BuildError with a way out where that cannot work."""

    def check_target(self, sm: int) -> None:
        """Raises BuildError where this backend cannot build for compute capability `sm` (80 for 8.0) here."""

    def set_target(self, trt: Any, config: Any, sm: int) -> None:
        """Tells a builder config which GPU to compile for."""


def find_backend(name: str) -> Backend:
    """The backend of that name. Raises BuildError where there is none."""
    if name not in BACKENDS:
        raise BuildError(f"there is no build backend {name!r}", hint=f"one of {', '.join(BACKENDS)}")
    backend: Backend = importlib.import_module(BACKENDS[name])
    return backend
