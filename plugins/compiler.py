"""Compiles a kernel to PTX for a GPU that need not be here.

Triton caches what it compiled by the content of source, options and its own version (TRITON_CACHE_DIR, by default in
~/.triton). PTX and not machine code goes into an engine: the driver of the GPU's host finishes it.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import BuildError
from plugins.operation import Kernel

SMS = (80, 89, 90, 120)
# PTX that CUDA 12.8's drivers and later read; Triton's own choice follows the newest assembler it carries.
PTX_VERSION = 87
# What Triton compiles for: PTX that is tied to these, where that for others runs on every later GPU, too.
NAMES = {90: "sm_90a", 120: "sm_120a"}
LONGEST_WORDS = 500  # of the compiler's, in a message
_ALIGNED = [["tt.divisibility", 16]]  # all memory that TensorRT hands out is aligned to more


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """entry: the kernel's name in the PTX. threads: of a program. shared: bytes that a launch asks for. registers: of
    a thread. spills: bytes of registers that each thread keeps in memory instead."""

    ptx: bytes
    entry: str
    sm: int
    threads: int
    shared: int
    registers: int
    spills: int


def choose_sm(sm: int) -> int:
    """The SM whose PTX goes into an engine for a GPU of `sm`: one of SMS, which the kernels are tested for; the GPU's
    own where none of them runs on it."""
    return max((known for known in SMS if known == sm or (known < sm and known not in NAMES)), default=sm)


@cache
def compile_kernel(kernel: Kernel, sm: int) -> Compiled:
    """Raises BuildError with the compiler's words: FP8 below SM89, above all."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise BuildError(
            f"kernels cannot be compiled: {error}",
            hint="`pip install triton`, or set the operation's stages.build.lowering to native",
        ) from error
    function = getattr(importlib.import_module(kernel.module), kernel.function)
    if not isinstance(function, triton.JITFunction):
        raise BuildError(
            f"{kernel.function} was loaded for Triton's interpreter, and cannot be compiled",
            hint="unset TRITON_INTERPRET",
        )
    types = dict(kernel.parameters)
    constants = dict(kernel.constants) | ({"SM": sm} if "SM" in function.arg_names else {})
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in function.arg_names},
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): _ALIGNED for i, name in enumerate(function.arg_names) if types.get(name, "").startswith("*")},
    )
    # Line numbers would name this machine's files in every engine.
    triton.knobs.compilation.disable_line_info = True
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, "ptx_version": PTX_VERSION}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    except Exception as error:  # whatever its passes raise
        raise BuildError(
            f"kernel {kernel.function} does not compile for SM{sm}: {_explain(error)}",
            hint="set the operation's stages.build.lowering to native",
        ) from error
    ptx = made.asm["ptx"].encode()
    registers, spills = _assemble(ptx, sm)
    return Compiled(
        ptx=ptx,
        entry=made.metadata.name,
        sm=sm,
        threads=made.metadata.num_warps * 32,
        shared=made.metadata.shared,
        registers=registers,
        spills=spills,
    )


def _explain(error: BaseException) -> str:
    """The compiler's words, and the statement that they are about: Triton shows the source up to there, and a caret
    below it; of a function that a kernel calls in the error's cause, or in one below the other."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    last = max((index for index, line in enumerate(lines) if line == "^"), default=0)
    words = " ".join(lines[last + 1 :] if last else lines)[-LONGEST_WORDS:]
    return f"{words}, at `{lines[last - 1]}`" if last else words


def _assemble(ptx: bytes, sm: int) -> tuple[int, int]:
    """What Triton's own assembler says of the kernel: registers, and bytes spilled."""
    from triton import knobs

    tools: Any = knobs.nvidia
    tool = tools.ptxas_blackwell if sm >= 100 else tools.ptxas
    with tempfile.TemporaryDirectory(prefix="trtseek-ptx-") as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_bytes(ptx)
        command = [tool.path, "-v", f"--gpu-name={NAMES.get(sm, f'sm_{sm}')}", str(path), "-o", str(path) + ".cubin"]
        run = subprocess.run(command, capture_output=True, text=True)
    found = [re.search(pattern, run.stderr) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")]
    if run.returncode or not all(found):
        raise BuildError(f"ptxas refuses a kernel for SM{sm}: {run.stderr.strip()[:500]}", hint="report this")
    registers, spills = (int(match[1]) for match in found if match)
    return registers, spills
