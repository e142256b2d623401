"""Whether a package serves: it is loaded in a server of its own, and one small request goes through everything."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import PackageError, TrtseekError
from pipeline.release.manifest import MANIFEST, find_wrong_sizes
from pipeline.triton.addresses import Addresses, reach
from pipeline.triton.client import Client
from pipeline.triton.emission import BACKENDS, REPOSITORY
from pipeline.triton.errors import ServerError
from pipeline.triton.installation import Installation, find_installation
from pipeline.triton.model_config import parse_config
from pipeline.triton.query import Query
from pipeline.triton.server import TritonServer

# The smallest request that goes through tokenizer, executor and network.
CANARY = Query(text="a", options={"max_tokens": 1}, parameters={"priority_class": "P0"})
LOAD_S, ANSWER_S = 600.0, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Seconds until all models were loaded, and until the canary was answered."""

    loaded: float
    answered: float


def send_canary(addresses: Addresses, timeout: float = ANSWER_S) -> float:
    """The seconds until the answer was there. Raises ServerError, ServingError."""
    with Client(f"{reach(addresses.host)}:{addresses.grpc}") as client:
        return client.ask(CANARY, timeout=timeout).seconds


def find_package(folder: Path) -> tuple[Path, Path]:
    """The model repository and the backends of a package. Raises PackageError where the folder is none, or damaged:
    Triton would say of such a model that it cannot be loaded, and no more."""
    repository, backends = folder / REPOSITORY, folder / BACKENDS
    for part in (repository, backends):
        if not part.is_dir():
            raise PackageError(f"{part} is missing: {folder} is no package", hint="`trtseek engine CONFIG` makes one")
    if (folder / MANIFEST).is_file():
        # Whoever serves a package may set its models' parameters: a config.pbtxt only has to be one.
        problems = [each for each in find_wrong_sizes(folder) if "config.pbtxt has " not in each]
        if problems:
            raise PackageError("\n".join(problems), hint="copy the package again, or make it again: `trtseek engine`")
    for file in sorted(repository.glob("*/config.pbtxt")):
        parse_config(file.read_text(encoding="utf-8"), str(file))
    return repository.resolve(), backends.resolve()


def check_package(folder: Path, *, log: Path, installation: Installation | None = None) -> Check:
    """Loads a package, sends one request, and ends the server. Raises ServerError with what went wrong."""
    repository, backends = find_package(folder)
    server = TritonServer(
        installation or find_installation(), repository=repository, backends=[backends], log=log, grace=1.0
    )
    with server:
        began = time.monotonic()
        server.start(LOAD_S)
        loaded = time.monotonic() - began
        try:
            return Check(loaded=loaded, answered=send_canary(server.addresses))
        except TrtseekError as error:
            raise ServerError(
                f"the package is loaded, and a first request failed: {error.message}", hint=f"the server's log: {log}"
            ) from error
