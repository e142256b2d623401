"""How `tensorrt_llm_bls` reaches `tensorrt_llm`: by a socket between their two processes, past Triton.

Triton's own way, `InferenceRequest.exec(decoupled=True)`, is not safe under load in 24.10: its stub waits for Python's
lock while it holds the locks of its own that a holder of Python's lock waits for (ResponseIterator::Next against
GetResponseIterator), and destroys arrays without it (PbTensor): processes hang, and crash.

A message is a length, a head in JSON and the arrays' bytes. The name of the socket has no file: it is of the kernel's
namespace for such names, and gone with the process. Both ends see to it that the other is of the same server.

Copied into the version folder of `tensorrt_llm_bls`. Knows nothing of Triton, so it is tested without it.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
Message = tuple[dict[str, Any], Arrays]

_LENGTHS = struct.Struct("<II")  # of the head, of the arrays
MAX_BYTES = 1 << 30
KINDS = "biuf"  # of arrays: plain numbers
ENOUGH = "enough"  # in the head of what follows a request: its answer is complete


def name_socket(model: str) -> bytes:
    """Of this server: its models' processes have one parent, whose id means something in one namespace only."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"\0trtseek-{namespace}-{os.getppid()}-{model}".encode()


def is_sibling(peer: socket.socket) -> bool:
    """Whether the other end is a process of the same user, and of this one's parent."""
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return int(stat.rpartition(")")[2].split()[1]) == os.getppid()


def pack(head: dict[str, Any], arrays: Arrays | None = None) -> bytes:
    arrays = arrays or {}
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**head, "arrays": described}).encode()
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return _LENGTHS.pack(len(text), len(body)) + text + body


class Unpacker:
    """Messages from pieces of a stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[Message]:
        """Those that are complete now. Raises ValueError for what is no message."""
        self._buffer += piece
        while len(self._buffer) >= _LENGTHS.size:
            head_bytes, body_bytes = _LENGTHS.unpack_from(self._buffer)
            if max(head_bytes, body_bytes) > MAX_BYTES:
                raise ValueError(f"a message of {head_bytes + body_bytes} bytes")
            end = _LENGTHS.size + head_bytes + body_bytes
            if len(self._buffer) < end:
                return
            start = _LENGTHS.size + head_bytes
            head = json.loads(self._buffer[_LENGTHS.size : start])
            arrays = _unpack_arrays(head.pop("arrays"), bytes(self._buffer[start:end]))
            del self._buffer[:end]
            yield head, arrays


def _unpack_arrays(described: list[Any], body: bytes) -> Arrays:
    arrays, place = {}, 0
    for name, kind, shape in described:
        dtype, count = np.dtype(kind), math.prod(shape)
        if dtype.kind not in KINDS:
            raise ValueError(f"{name} is of {kind}")
        values = np.frombuffer(body, dtype, count, place) if count else np.zeros(0, dtype)
        arrays[name] = values.reshape(shape)
        place += count * dtype.itemsize
    return arrays
