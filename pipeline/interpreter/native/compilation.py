"""Compiles the kernels, by the machine's own compiler and for its processor, and keeps the result.

That takes some 20 s of processor and would be done by every process that serves or tests: so what is compiled
stays in the user's cache, under a name that says what it was made of.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
HERE = Path(__file__).parent
SOURCES = tuple(
    HERE / f"{name}.c"
    for name in ("calls", "linear", "pointwise", "rotary", "attention", "chunks", "heads", "experts", "small")
)
# No traps and no errno: nothing here reads them, and loops with a condition become vectors. NaN and infinity stay.
FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-fno-math-errno", "-fopenmp", "-fPIC")
COMPILERS = ("gcc", "cc", "clang")
SHARED = (0,)  # users whose code everybody runs: an image's cache is root's
SECONDS = 300  # of each source: on a busy machine a hundred times what it takes


def find_compiler() -> str | None:
    """What $CC names; without it the first of the usual ones that is here."""
    names = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    return next(filter(None, map(shutil.which, names)), None)


def compile_library(options: Sequence[str], load: Callable[[Path], T]) -> T | None:
    """What `load` makes of the shared library, which it raises OSError or AttributeError for where it is spoilt. None
    where it cannot be compiled or loaded here. `options`: more of the compiler's."""
    compiler = find_compiler()
    if compiler is None:
        return None
    command = [compiler, *FLAGS, *options]
    try:
        name = f"kernels-{_digest(command)}.so"
        for folder in _list_folders():
            path = folder / name
            with contextlib.suppress(OSError, AttributeError):
                if path.stat().st_uid in (*SHARED, os.getuid()):  # code of nobody else's
                    return load(path)
            with contextlib.suppress(OSError, AttributeError):  # a folder that cannot be written: the next
                _compile(command, path)
                return load(path)
    except (OSError, subprocess.SubprocessError):
        pass  # another compiler, or no OpenMP
    return None


def _list_folders() -> Iterator[Path]:
    """`trtseek` in the user's cache ($XDG_CACHE_HOME, or ~/.cache), where code can be loaded from it; then a new folder
    for this process."""
    with contextlib.suppress(OSError, RuntimeError):  # no home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trtseek"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.statvfs(folder).f_flag & os.ST_NOEXEC:
            yield folder
    folder = Path(tempfile.mkdtemp(prefix="trtseek-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    yield folder


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
