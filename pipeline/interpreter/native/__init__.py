"""Kernels in C for decoding, where torch has none as fast: INT4 or INT8 weights times few bf16 rows, and the RMS norm.

Compiled in a second when first asked for, by the machine's own compiler, for processors with AVX-512 bf16. Where either
is missing, torch's kernels run: more slowly, within the same roundings.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SOURCES = tuple(Path(__file__).with_name(name) for name in ("linear.c", "norm.c"))
FLAGS = ("-O3", "-march=x86-64-v4", "-mavx512bf16", "-fopenmp", "-shared", "-fPIC")
SECONDS = 60
_POINTER, _FLOAT, _INT, _LONG = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_long

Function = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Those of the C files, by name; pointers are passed as integers."""

    int4_linear: Function
    int8_linear: Function
    rms_norm: Function


@functools.cache
def load_functions() -> Functions | None:
    """None where they cannot be compiled or run here."""
    import torch

    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None or not torch.cpu._is_avx512_bf16_supported():
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        command = [compiler, *FLAGS, "-o", str(library), *map(str, SOURCES), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            loaded = ctypes.CDLL(str(library))
        except (OSError, subprocess.SubprocessError):
            return None  # another compiler, or no OpenMP
    linears, norm = (loaded.int4_linear, loaded.int8_linear), loaded.rms_norm
    for function in linears:
        function.argtypes = [*[_POINTER] * 4, _INT, *[_LONG] * 4, _INT]
    norm.argtypes = [*[_POINTER] * 3, _FLOAT, *[_LONG] * 2]
    for function in (*linears, norm):
        function.restype = None
    return Functions(int4_linear=linears[0], int8_linear=linears[1], rms_norm=norm)
