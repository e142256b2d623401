"""Where a tritonserver is, and what its Python stub needs so that it finds this project.

Two are known: `tritonserver` on PATH, as in NVIDIA's image, and the one that the wheel nvidia-pytriton carries, which
is started directly. Triton's Python backend runs each Python model in a process of its own, the stub, which embeds the
libpython it was built with, and takes its packages from the first `python3` on PATH: so the stub must be of the same
Python version as this process, and PATH begins with this interpreter's folder. The embedded interpreter is an isolated
one, which ignores PYTHONPATH and all other PYTHON… variables. What stands there, and the folder of this project where
it is run without being installed, is written into the server's own copy of the Python backend instead.

Without this module, as when NVIDIA's image is started with a command of its own, nothing but the first way is left:
`python3 -m pip install trtseek` in the image, and a link in its backends to the package's backends/trtseek.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pipeline
from pipeline.triton.errors import ServerError

WHEEL = "nvidia-pytriton"
# Where the library makes folders for environments of models' own, one for each server, which outlives a server that is
# killed; and a path as long that begins at the folder above the one that the server is started in, which is its own.
ENVIRONMENTS, OWN_ENVIRONMENTS = b"/tmp/python_env_", b"..///python_env_"
STUB, LIBRARY, BACKEND_UTILS = "triton_python_backend_stub", "libtriton_python.so", "triton_python_backend_utils.py"
# Every model imports Triton's utilities. First, as PYTHONPATH is in this process: another trtseek may be installed.
SETTINGS = "import sys\n\nsys.path[:0] = "
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A tritonserver with its Python backend.

    binary: the server. python_backend: the folder of libtriton_python.so. stub: the stub for this Python. libraries:
    folders that the loader must search. caches: the server's cache implementations, None where its default is right.
    """

    binary: Path
    python_backend: Path
    stub: Path
    libraries: tuple[Path, ...] = ()
    caches: Path | None = None

    def environment(self) -> dict[str, str]:
        """The environment for the server, and for the stubs that it starts."""
        libraries = [*self.libraries, Path(sysconfig.get_config_var("LIBDIR"))]
        paths = {
            # The stub's libpython must be this interpreter's: the loader's default may be another build of the version.
            "LD_LIBRARY_PATH": [str(folder) for folder in libraries],
            "PATH": [str(Path(sys.executable).parent)],
        }
        # Each of glibc's arenas keeps what its largest request took, and there may be eight for every core. And weights
        # in pages of 2 MiB: every token reads all of them, a third faster so (torch's switch, read at its start).
        environment = {"MALLOC_ARENA_MAX": "2", "THP_MEM_ALLOC_ENABLE": "1", **os.environ}
        for name, folders in paths.items():
            value = os.pathsep.join([*folders, *filter(None, [os.environ.get(name)])])
            if value:
                environment[name] = value
        return environment

    def link_backends(self, folder: Path, *others: Path) -> None:
        """Makes `folder` a backend directory: Triton's Python backend, and each folder in `others` beside it.

        A Python-based backend (a folder with a model.py) is run by the Python backend that stands beside it.
        """
        python = folder / "python"
        python.mkdir(parents=True)
        shutil.copy(self.stub, python / self.stub.name)  # copied: Triton looks for it beside the library
        library = (self.python_backend / LIBRARY).read_bytes()
        (python / LIBRARY).write_bytes(library.replace(ENVIRONMENTS, OWN_ENVIRONMENTS))
        utils = (self.python_backend / BACKEND_UTILS).read_text(encoding="utf-8")
        (python / BACKEND_UTILS).write_text(f"{utils}\n\n{SETTINGS}{list(find_python_path())!r}\n", encoding="utf-8")
        for other in others:
            for backend in sorted(entry for entry in other.iterdir() if entry.is_dir()):
                mirror(backend, folder / backend.name)


def mirror(source: Path, target: Path) -> None:
    """Makes `target` what `source` is, of links to its files, but copies of its Python modules: Python writes compiled
    ones beside them, and a package must stay what its checksums say."""
    target.mkdir(parents=True)
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            if entry.name != "__pycache__":
                mirror(entry, target / entry.name)
        elif entry.suffix == ".py":
            shutil.copyfile(entry, target / entry.name)
        else:
            (target / entry.name).symlink_to(entry.resolve())


def find_installation(binary: Path | None = None) -> Installation:
    """The tritonserver given, else the one on PATH, else the wheel's. Raises ServerError."""
    found = binary or (Path(path) if (path := shutil.which("tritonserver")) else None)
    installation = _of_system(found) if found else _of_wheel()
    _check_stub(installation.stub)
    return installation


def find_python_path() -> tuple[str, ...]:
    """Folders that this process imports from and the stub would not: those of PYTHONPATH, and this project's own where
    it is not installed."""
    root = Path(pipeline.__file__).resolve().parents[1]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    given = [str(Path(folder).resolve()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return tuple(dict.fromkeys([*given, *([] if root in installed else [str(root)])]))


def _of_system(binary: Path) -> Installation:
    """An installation laid out as /opt/tritonserver is: bin/, backends/python/."""
    root = binary.resolve().parent.parent
    backend = root / "backends" / "python"
    for file in (binary, backend / LIBRARY, backend / STUB):
        if not file.is_file():
            raise ServerError(
                f"{file} is missing, and a tritonserver with its Python backend has it",
                hint="NVIDIA's images with `py3` in their tag have the Python backend",
            )
    return Installation(binary=binary.resolve(), python_backend=backend, stub=backend / STUB)


def _of_wheel() -> Installation:
    try:
        root = Path(str(metadata.distribution(WHEEL).locate_file("")))
    except metadata.PackageNotFoundError:
        raise ServerError(
            f"there is no tritonserver on PATH, and the wheel {WHEEL}, which carries one, is not installed",
            hint=f"pip install {WHEEL}==0.7.0 (Linux on x86-64), or run inside NVIDIA's tritonserver image",
        ) from None
    server = root / "pytriton" / "tritonserver"
    stub = server / "python_backend_stubs" / THIS_PYTHON / STUB
    if not stub.is_file():
        have = sorted(entry.name for entry in (server / "python_backend_stubs").glob("3.*"))
        raise ServerError(f"{WHEEL} has no stub for Python {THIS_PYTHON}", hint=f"it has those of {', '.join(have)}")
    return Installation(
        binary=server / "bin" / "tritonserver",
        python_backend=server / "backends" / "python",
        stub=stub,
        libraries=(root / "nvidia_pytriton.libs",),
        caches=server / "caches",
    )


def _check_stub(stub: Path) -> None:
    """The stub names its libpython as a needed library; of another version it would not see this one's packages."""
    versions = {found.decode() for found in re.findall(rb"libpython(3\.\d+)", stub.read_bytes())}
    if versions and THIS_PYTHON not in versions:
        raise ServerError(
            f"{stub} is built for Python {', '.join(sorted(versions))}, and this is Python {THIS_PYTHON}",
            hint=f"install trtseek with python{min(versions)}, so that the stub finds its packages",
        )
