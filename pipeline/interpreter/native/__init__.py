"""Kernels in C for serving, where torch has none as fast: INT4 or INT8 weights times rows, 16-bit weights of heads
times theirs, routed experts, rotation into the cache, attention over its blocks, norms and gates; and what little a
router and tensors laid out anew take, so that they do not part the others.

Compiled when first asked for (compilation.py). Without a compiler torch's kernels run: more slowly, within the same
roundings.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.interpreter.native.compilation import compile_library

KERNELS = (
    "linear",
    "rms_norm",
    "gate",
    "rotate_into_cache",
    "attend_pages",
    "attend_chunks",
    "multiply_heads",
    "join_rotated",
    "run_experts",
    "elementwise",
    "copy",
    "reduce",
    "score_rows",
    "top",
    "one_hot",
    "pick",
)  # in the order of calls.c
MOST_ARGUMENTS = 28  # as in calls.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A kernel, and the memory that it works on.

    arguments: those of the struct above it in C, addresses as integers. outputs: the tensors that it fills, as the
    node's consumers see them. scratch: bytes to work in. threads: that share the work. refusal: what it means where the
    kernel refuses its arguments.
    """

    kernel: str | None  # None: nothing is computed, the outputs are inputs seen in another shape
    arguments: tuple[int | None, ...]
    outputs: Any
    scratch: int = 0
    threads: int = 1
    refusal: str = ""


def count_threads(work: int, fewest: int) -> int:
    """All of torch's where there is as much work as that, else one."""
    return torch.get_num_threads() if work >= fewest else 1


class Library:
    """The compiled kernels."""

    def __init__(self, path: Path) -> None:
        self._run = ctypes.CDLL(str(path)).run
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_int)
        self._run.restype = ctypes.c_long

    def lay_out(self, calls: Sequence[Call], empty: Callable[..., torch.Tensor] = torch.empty) -> Calls:
        """`empty` makes the scratch memory."""
        return Calls(self._run, calls, empty)


class Calls:
    """Calls that are made one after the other by the same threads, as often as one likes. Holds the scratch memory, not
    inputs and outputs."""

    def __init__(
        self, run: Callable[[int, int, int], int], calls: Sequence[Call], empty: Callable[..., torch.Tensor]
    ) -> None:
        self._run, self._count = run, len(calls)
        self._threads = max(call.threads for call in calls)
        self._scratch = empty((max(call.scratch for call in calls),), dtype=torch.uint8)
        words = array("q")
        for call in calls:
            words.extend((KERNELS.index(str(call.kernel)), call.threads > 1, self._scratch.data_ptr()))
            words.extend(value or 0 for value in call.arguments)
            words.extend([0] * (MOST_ARGUMENTS - len(call.arguments)))
        self._words = words

    def run(self) -> int | None:
        """Returns the number of the call that refused its arguments (a place or a block that is none), after which none
        was made."""
        address, _ = self._words.buffer_info()
        made = self._run(address, self._count, self._threads)
        return None if made == self._count else made


@functools.cache
def load_library(*options: str) -> Library | None:
    """None where the kernels cannot be compiled here. `options`: more of the compiler's (-DPORTABLE: no instruction
    that only x86 has)."""
    return compile_library(options, Library)
