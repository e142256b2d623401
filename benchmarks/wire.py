"""Bytes that this process has sent over TCP, as Linux counts them: what an exchange really costs on the wire."""

from __future__ import annotations

import os
import socket
import struct
import time

LISTENS = 10  # a socket's state, the first byte of struct tcp_info (linux/tcp.h)
# Where its other numbers are, and how they are stored.
UNACKNOWLEDGED, ACKNOWLEDGED, NOT_SENT = ("I", 24), ("Q", 120), ("I", 144)
LENGTH, PAUSE, PATIENCE = 256, 0.01, 30.0  # bytes of struct tcp_info; seconds


def count_sent() -> int:
    """Of all connections that are open, once everything has arrived: what the other ends acknowledged, so that nothing
    sent twice counts twice. Raises OSError where the system does not count (Linux does, from 4.6 on), TimeoutError
    where the other end takes no more."""
    deadline = time.monotonic() + PATIENCE
    while (total := _add_up()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"what was sent has not arrived after {PATIENCE:.0f} s")
        time.sleep(PAUSE)
    return total


def _add_up() -> int | None:
    """None while something is under way."""
    total = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            connection = socket.socket(fileno=number)
        except OSError:  # a file, a pipe, or the listing's own, closed by now
            continue
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                continue
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LENGTH)
            if told[0] == LISTENS:
                continue
            if _read(told, UNACKNOWLEDGED) or _read(told, NOT_SENT):
                return None
            total += _read(told, ACKNOWLEDGED)
        finally:
            connection.detach()
    return total


def _read(told: bytes, place: tuple[str, int]) -> int:
    kind, at = place
    if len(told) < at + struct.calcsize(kind):
        raise OSError("this system does not count the bytes of TCP connections")
    (value,) = struct.unpack_from(kind, told, at)
    return int(value)
