"""TensorRT-RTX: compiles on any x86-64 host, GPU or not, ahead of time for a named target; the GPU's own runtime
finishes the kernels (JIT) when it loads the engine.
"""

from __future__ import annotations

from typing import Any

from pipeline.errors import BuildError

# What set_compute_capability takes. 8.0 is a build target and TensorRT-RTX's guide names it among the GPUs that an
# engine runs on, but its support matrix does not list the A100.
TARGETS = (75, 80, 86, 89, 120, 121)
HAS_READABLE_FILES = True


def load() -> Any:
    try:
        import tensorrt_rtx
    except ImportError as error:
        raise BuildError(
            f"TensorRT-RTX cannot be imported: {error}", hint="`pip install tensorrt-rtx`, or `make` with a fresh .venv"
        ) from error
    return tensorrt_rtx


def check_target(sm: int) -> None:
    if sm not in TARGETS:
        raise BuildError(
            f"TensorRT-RTX does not build for SM{sm}",
            hint=f"targets: {', '.join(f'SM{t}' for t in TARGETS)}; for others use backend: tensorrt on that GPU",
        )


def set_target(trt: Any, config: Any, sm: int) -> None:
    config.num_compute_capabilities = 1
    if not config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0):
        raise BuildError(f"TensorRT-RTX {trt.__version__} refuses the target SM{sm}", hint="see the build log")
