"""Compiles the kernels, by the machine's own compiler and for its processor, and keeps the result.

That takes half a minute of a busy core and would be done by every process that serves or tests: so what is compiled
stays in the user's cache, under a name that says what it was made of.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = tuple(
    HERE / f"{name}.c"
    for name in ("calls", "linear", "pointwise", "rotary", "attention", "chunks", "heads", "experts", "small")
)
# No traps and no errno: nothing here reads them, and loops with a condition become vectors. NaN and infinity stay.
FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-fno-math-errno", "-fopenmp", "-fPIC")
COMPILERS = ("gcc", "cc", "clang")
SECONDS = 300  # of each source: on a busy machine a hundred times what it takes


def find_compiler() -> str | None:
    """What $CC names; without it the first of the usual ones that is here."""
    names = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    return next(filter(None, map(shutil.which, names)), None)


def compile_library(options: Sequence[str], *, anew: bool = False) -> Path | None:
    """The shared library; None where it cannot be compiled here. `options`: more of the compiler's. `anew`: also where
    the cache has it."""
    compiler = find_compiler()
    if compiler is None:
        return None
    command = [compiler, *FLAGS, *options]
    path = _find_folder() / f"kernels-{_digest(command)}.so"
    if path.exists() and not anew:
        return path
    try:
        _compile(command, path)
    except (OSError, subprocess.SubprocessError):
        return None  # another compiler, or no OpenMP
    return path


def _find_folder() -> Path:
    """`trtseek` in the user's cache ($XDG_CACHE_HOME, or ~/.cache); where nothing can be written there, a new folder
    for this process."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trtseek"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # no home
        folder = Path(tempfile.mkdtemp(prefix="trtseek-kernels-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder


def _digest(command: Sequence[str]) -> str:
    """Of all that the result depends on: sources, command, compiler, processor."""
    status = os.stat(command[0])
    digest = hashlib.sha256(repr((command, status.st_size, status.st_mtime_ns, _describe_processor())).encode())
    for source in sorted(HERE.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _describe_processor() -> list[str]:
    """What -march=native looks at: the model and its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", maxsplit=1)[0].splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    return [line for line in lines if line.split("\t")[0].split(" ")[0] in ("model", "vendor_id", "flags", "Features")]


def _compile(command: Sequence[str], path: Path) -> None:
    """Each source by a process of its own: together they take as long as the longest, where there are cores for them.
    `path` is there when all of it is."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in SOURCES]
        calls = [[*command, "-c", str(s), "-o", str(o)] for s, o in zip(SOURCES, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_call, calls))
        made = Path(folder) / path.name
        _call([*command, "-shared", "-o", str(made), *map(str, objects), "-lm"])
        made.replace(path)


def _call(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
