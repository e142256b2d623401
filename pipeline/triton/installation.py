"""Where a tritonserver is, and what its Python stub needs so that it finds this project.

Two are known: `tritonserver` on PATH, as in NVIDIA's image, and the one that the wheel nvidia-pytriton carries, which
is started directly. Triton's Python backend runs each Python model in a process of its own, the stub, which embeds the
libpython it was built with and takes its packages from the first `python3` on PATH. So the stub must be of the same
Python version as this process; PATH begins with this interpreter's folder; and, where this project is not installed but
run from its folder (as with an editable installation), PYTHONPATH names that folder.

In NVIDIA's image the same holds without this module: `python3 -m pip install trtseek` into the image's own Python, and
the stub finds it; or PYTHONPATH names a folder that it was installed into.
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
STUB, LIBRARY, BACKEND_UTILS = "triton_python_backend_stub", "libtriton_python.so", "triton_python_backend_utils.py"
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
            "PYTHONPATH": list(find_python_path()),
        }
        environment = dict(os.environ)
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
        for source in (self.python_backend / LIBRARY, self.python_backend / BACKEND_UTILS, self.stub):
            shutil.copy(source, python / source.name)  # copied: Triton looks for the stub beside the library
        for other in others:
            for backend in sorted(entry for entry in other.iterdir() if entry.is_dir()):
                (folder / backend.name).symlink_to(backend.resolve(), target_is_directory=True)


def find_installation(binary: Path | None = None) -> Installation:
    """The tritonserver given, else the one on PATH, else the wheel's. Raises ServerError."""
    found = binary or (Path(path) if (path := shutil.which("tritonserver")) else None)
    installation = _of_system(found) if found else _of_wheel()
    _check_stub(installation.stub)
    return installation


def find_python_path() -> tuple[str, ...]:
    """What the stub's PYTHONPATH needs so that it imports this very project: nothing where it is installed."""
    root = Path(pipeline.__file__).resolve().parents[1]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return () if root in installed else (str(root),)


def _of_system(binary: Path) -> Installation:
    """An installation laid out as /opt/tritonserver is: bin/, backends/python/."""
    root = binary.resolve().parents[1]
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
