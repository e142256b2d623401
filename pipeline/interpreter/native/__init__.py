"""Kernels in C for decoding, where torch has none as fast: INT4 or INT8 weights times rows, rotation into the cache,
attention over its blocks, norms and gates.

Compiled in a second when first asked for, by the machine's own compiler and for its processor. Without a compiler
torch's kernels run: more slowly, within the same roundings.
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

SOURCES = tuple(Path(__file__).with_name(name) for name in ("linear.c", "pointwise.c", "rotary.c", "attention.c"))
# No traps and no errno: nothing here reads them, and loops with a condition become vectors. NaN and infinity stay.
FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("gcc", "cc", "clang")
SECONDS = 60
CHECKED = ("rotate_into_cache", "attend_pages")
_POINTER, _FLOAT, _INT, _LONG = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_long

Function = Callable[..., None]
Checked = Callable[..., int]  # 0, or 1 where it refused what it was given


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Those of the C files, by name; pointers are passed as integers."""

    int4_linear: Function
    int8_linear: Function
    rms_norm: Function
    gate: Function
    rotate_into_cache: Checked
    attend_pages: Checked


def find_compiler() -> str | None:
    """What $CC names; without it the first of the usual ones that is here."""
    names = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    return next(filter(None, map(shutil.which, names)), None)


@functools.cache
def load_functions(*options: str) -> Functions | None:
    """None where they cannot be compiled here. `options`: more of the compiler's (-DPORTABLE: no
    instruction that only x86 has)."""
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
    linear = [_INT, *[_POINTER] * 3, _INT, *[_POINTER] * 2, *[_LONG] * 4, _INT]
    arguments = {
        "int4_linear": linear,
        "int8_linear": linear,
        "rms_norm": [_INT, *[_POINTER] * 5, _FLOAT, *[_LONG] * 2],
        "gate": [_INT, *[_POINTER] * 3, *[_LONG] * 4],
        "rotate_into_cache": [_INT, _INT, *[_POINTER] * 7, *[_LONG] * 7, _INT],
        "attend_pages": [_INT, *[_POINTER] * 7, *[_LONG] * 8, _INT],
    }
    functions = {name: getattr(loaded, name) for name in arguments}
    for name, function in functions.items():
        function.argtypes, function.restype = arguments[name], _INT if name in CHECKED else None
    return Functions(**functions)
