"""Packages as a benchmark takes them: in a server, in another mode of the interpreter, without a network's cost."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.idle import write_backends
from pipeline.triton.canary import LOAD_S
from pipeline.triton.emission import ARTIFACTS
from pipeline.triton.installation import find_installation, mirror
from pipeline.triton.model_config import parse_config, print_config
from pipeline.triton.package import find_package
from pipeline.triton.server import TritonServer

MODEL = "tensorrt_llm"


@contextlib.contextmanager
def serving(package: Path, *, mode: str | None = None, idle: float | None = None) -> Iterator[TritonServer]:
    """A server over the package; `mode`: in another mode of the interpreter than it was packaged with; `idle`: with a
    network that sleeps so many seconds a step."""
    with tempfile.TemporaryDirectory(prefix="trtseek-bench-") as folder:
        found = find_package(package)
        repository, backends = found.repository, found.backends
        assert backends is not None  # of flavour trtseek
        if mode is not None:
            repository = change_mode(repository, Path(folder) / "package", mode)
        if idle is not None:
            backends = write_backends(backends, Path(folder) / "backends", idle)
        log = Path(folder) / "server.log"
        server = TritonServer(find_installation(), repository=repository, backends=[backends], log=log, grace=5)
        with server:
            server.start(LOAD_S)
            yield server


def read_parameters(repository: Path) -> dict[str, str]:
    config = parse_config((repository / MODEL / "config.pbtxt").read_text(encoding="utf-8"), MODEL)
    return {key: value.string_value for key, value in config.parameters.items()}


def read_vocabulary(repository: Path) -> int:
    """How many tokens the package's model knows."""
    checkpoint = (repository / MODEL / read_parameters(repository)["checkpoint_path"]).resolve()
    return int(json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def change_mode(repository: Path, folder: Path, mode: str) -> Path:
    """The same repository under `folder`, its interpreter in another mode."""
    changed = folder / repository.name
    mirror(repository, changed)
    (folder / ARTIFACTS).symlink_to((repository.parent / ARTIFACTS).resolve(), target_is_directory=True)
    path = changed / MODEL / "config.pbtxt"
    config = parse_config(path.read_text(encoding="utf-8"), str(path))
    config.parameters["interpreter_mode"].string_value = mode
    path.unlink()  # a link to the package's own
    path.write_text(print_config(config), encoding="utf-8")
    return changed
