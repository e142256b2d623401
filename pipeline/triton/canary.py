"""Whether a package serves: it is loaded in a server of its own, and one small request goes through everything."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import TrtseekError
from pipeline.triton.addresses import Addresses, reach
from pipeline.triton.client import Client
from pipeline.triton.errors import ServerError
from pipeline.triton.installation import Installation, find_installation
from pipeline.triton.package import Rehearsal, find_package
from pipeline.triton.query import Query

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


def check_package(
    folder: Path, *, log: Path, installation: Installation | None = None, rehearsal: Rehearsal | None = None
) -> Check:
    """Loads a package, sends one request, and ends the server. Raises ServerError with what went wrong."""
    server = find_package(folder).make_server(
        installation or find_installation(), log=log, rehearsal=rehearsal, grace=1.0
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
