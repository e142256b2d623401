"""Where a server listens."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a server listens. A port of 0 is replaced by a free one."""

    host: str = LOOPBACK
    http_host: str = LOOPBACK
    http: int = 0
    grpc: int = 0
    metrics: int = 0

    def resolve(self) -> Addresses:
        """With free ports in the place of 0."""
        with contextlib.ExitStack() as held:
            ports = {name: getattr(self, name) or _free_port(held) for name in ("http", "grpc", "metrics")}
        return Addresses(host=self.host, http_host=self.http_host, **ports)


def reach(host: str) -> str:
    """An address of this host for one that means every interface."""
    return {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, host)


def _free_port(held: contextlib.ExitStack) -> int:
    """A port that is free now; held until all are found, so that no two are the same."""
    listener = held.enter_context(socket.socket())
    listener.bind((LOOPBACK, 0))
    return int(listener.getsockname()[1])
