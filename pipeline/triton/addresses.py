"""Where a server listens."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from pipeline.triton.errors import ServerError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a server listens. A port of 0 is replaced by a free one. `host`: for HTTP and gRPC."""

    host: str = LOOPBACK
    metrics_host: str = LOOPBACK
    http: int = 0
    grpc: int = 0
    metrics: int = 0

    def resolve(self) -> Addresses:
        """With free ports in the place of 0."""
        with contextlib.ExitStack() as held:
            ports = {name: getattr(self, name) or _free_port(held) for name in ("http", "grpc", "metrics")}
        return Addresses(host=self.host, metrics_host=self.metrics_host, **ports)

    def check(self) -> None:
        """Raises ServerError for a port that cannot be listened on. Of a taken metrics port Triton says nothing;
        it ends after it has loaded its models. HTTP is left out: it is the gate's, or was free just now."""
        with contextlib.ExitStack() as held:
            held.enter_context(listen(self.host, self.grpc, "--grpc-port"))
            held.enter_context(listen(self.metrics_host, self.metrics, "--metrics-port"))


def listen(host: str, port: int, option: str) -> socket.socket:
    """Raises ServerError where nobody can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise refuse(host, port, error, option) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: not what just ended
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise refuse(host, port, error, option) from error
    return listener


def refuse(host: str, port: int, error: OSError, option: str) -> ServerError:
    """That nobody can listen there. asyncio's words name the address again; a name that is not found has no errno."""
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    return ServerError(f"{host}:{port} cannot be listened on: {reason}", hint=f"choose another {option} or --host")


def reach(host: str) -> str:
    """An address of this host for one that means every interface."""
    return {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, host)


def _free_port(held: contextlib.ExitStack) -> int:
    """A port that is free now; held until all are found, so that no two are the same."""
    listener = held.enter_context(socket.socket())
    listener.bind((LOOPBACK, 0))
    return int(listener.getsockname()[1])
