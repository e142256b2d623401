"""Kernels in C for decoding, where torch has none as fast: INT4 or INT8 weights times few rows, the RMS norm, and
attention over the blocks of the cache.

Compiled in a second when first asked for, by the machine's own compiler and for its processor: with bf16 products where
it has them (AVX-512 bf16), else in fp32. Without a compiler torch's kernels run: more slowly, within the same
roundings.
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SOURCES = tuple(Path(__file__).with_name(name) for name in ("linear.c", "norm.c", "attention.c"))
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("gcc", "cc", "clang")
SECONDS = 60
_POINTER, _FLOAT, _INT, _LONG = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_long

Function = Callable[..., None]
Checked = Callable[..., int]  # 0, or 1 where it refused what it was given


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Those of the C files, by name; pointers are passed as integers. takes: the type of a linear's rows."""

    int4_linear: Function
    int8_linear: Function
    rms_norm: Function
    attend_pages: Checked
    takes: torch.dtype


def find_compiler() -> str | None:
    """What $CC names; without it the first of the usual ones that is here."""
    names = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    return next(filter(None, map(shutil.which, names)), None)


@functools.cache
def load_functions(*options: str) -> Functions | None:
    """None where they cannot be compiled here. `options`: more of the compiler's (-DPORTABLE: fp32 products, which is
    what most processors run, also where there are bf16 ones)."""
    import torch

    compiler = find_compiler()
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        command = [compiler, *FLAGS, *options, "-o", str(library), *map(str, SOURCES), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            loaded = ctypes.CDLL(str(library))
        except (OSError, subprocess.SubprocessError):
            return None  # another compiler, or no OpenMP
    arguments = {
        "int4_linear": [*[_POINTER] * 4, _INT, *[_LONG] * 4, _INT],
        "int8_linear": [*[_POINTER] * 4, _INT, *[_LONG] * 4, _INT],
        "rms_norm": [_INT, *[_POINTER] * 3, _FLOAT, *[_LONG] * 2],
        "attend_pages": [_INT, *[_POINTER] * 7, *[_LONG] * 8, _INT],
    }
    functions = {name: getattr(loaded, name) for name in arguments}
    for name, function in functions.items():
        function.argtypes, function.restype = arguments[name], _INT if name == "attend_pages" else None
    takes = torch.bfloat16 if _INT.in_dll(loaded, "takes_bf16").value else torch.float32
    return Functions(**functions, takes=takes)
