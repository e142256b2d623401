"""Whether a package serves: it is loaded in a server of its own, and one small request goes through everything."""

from __future__ import annotations

import queue
import threading
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


class Canaries:
    """Canaries while the server serves, each in a thread: the end of serving does not wait for it."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._result: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._flying = False

    def look(self, addresses: Addresses, *, every: float, timeout: float) -> str | None:
        """Sends one when `every` so many seconds have gone. Once of each: what was wrong with it; "" where it was
        answered."""
        if self._flying:
            try:
                error = self._result.get_nowait()
            except queue.Empty:
                return None
            self._flying, self._began = False, time.monotonic()
            return error
        if time.monotonic() - self._began > every:
            self._flying = True
            threading.Thread(target=self._fly, args=(addresses, timeout), name="canary", daemon=True).start()
        return None

    def _fly(self, addresses: Addresses, timeout: float) -> None:
        try:
            send_canary(addresses, timeout)
            self._result.put("")
        except TrtseekError as error:
            self._result.put(error.message)
        except Exception as error:  # whatever it is: while nothing comes of this one, there is no other
            self._result.put(str(error) or repr(error))
