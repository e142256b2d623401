"""Exchanges between GPUs, through NCCL's C interface. Not yet run on hardware.

The processes of the ranks are joined by gloo already (torch.distributed); over it they agree on NCCL's id of a group.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import CompatibilityError
from plugins.transport import Traffic

LIBRARY = "libnccl.so.2"
ID_BYTES = 128
_BYTE = 1  # ncclUint8


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class Nccl:
    """`library` is libnccl, or what stands in for it in tests."""

    def __init__(self, library: Any) -> None:
        self._nccl = library
        library.ncclGetErrorString.restype = ctypes.c_char_p

    def make_id(self) -> bytes:
        """Of a new group: made by one of its ranks, and told to all."""
        unique = _UniqueId()
        self._check("ncclGetUniqueId", ctypes.byref(unique))
        return bytes(unique)

    def connect(self, unique_id: bytes, ranks: int, rank: int) -> NcclTransport:
        """Waits until all ranks of the group have come. The current CUDA context is the one that will exchange."""
        handle = ctypes.c_void_p()
        unique = _UniqueId.from_buffer_copy(unique_id)
        self._check("ncclCommInitRank", ctypes.byref(handle), ctypes.c_int(ranks), unique, ctypes.c_int(rank))
        return NcclTransport(self, handle, ranks, rank)

    def exchange(self, moves: Sequence[tuple[str, int, int, int]], handle: ctypes.c_void_p, stream: int) -> None:
        """moves: (ncclSend or ncclRecv, address, bytes, rank), all under way at once."""
        self._check("ncclGroupStart")
        for call, address, size, peer in moves:
            where, count = ctypes.c_void_p(address), ctypes.c_size_t(size)
            self._check(call, where, count, ctypes.c_int(_BYTE), ctypes.c_int(peer), handle, ctypes.c_void_p(stream))
        self._check("ncclGroupEnd")

    def _check(self, call: str, *arguments: Any) -> None:
        status = getattr(self._nccl, call)(*arguments)
        if status:
            said = (self._nccl.ncclGetErrorString(status) or b"").decode()
            raise CompatibilityError(
                f"{call} failed: {said or f'error {status}'}",
                hint="look at what NCCL says with NCCL_DEBUG=INFO, and whether all ranks are alive",
            )


class NcclTransport:
    """A rank's communicator; memory is addresses on its GPU. handle: NCCL's own. See transport.Transport."""

    def __init__(self, nccl: Nccl, handle: ctypes.c_void_p, ranks: int, rank: int) -> None:
        self.ranks, self.rank, self.traffic = ranks, rank, Traffic()
        self.handle = handle
        self._nccl = nccl

    def exchange(self, source: int, target: int, sends: Sequence[int], receives: Sequence[int], stream: int) -> None:
        moves = []
        for call, address, sizes in (("ncclSend", source, sends), ("ncclRecv", target, receives)):
            for peer, size in enumerate(sizes):
                if size:
                    moves.append((call, address, size, peer))
                address += size
        self._nccl.exchange(moves, self.handle, stream)


@cache
def open_nccl() -> Nccl:
    """The library that is loaded already, the system's, or that of the wheel `nvidia-nccl-cu12`. Raises
    CompatibilityError where there is none."""
    places = [LIBRARY]
    if (wheel := importlib.util.find_spec("nvidia")) is not None:
        folders = wheel.submodule_search_locations or ()
        places += [str(Path(folder) / "nccl" / "lib" / LIBRARY) for folder in folders]
    problem = None
    for place in places:
        try:
            return Nccl(ctypes.CDLL(place))
        except OSError as error:
            problem = problem or error
    raise CompatibilityError(
        f"experts on several GPUs exchange rows through NCCL, and {LIBRARY} is not found: {problem}",
        hint="install NVIDIA's libnccl2, or `pip install nvidia-nccl-cu12`; or build with moe_all_to_all: native",
    )


def find_group(first: int, ranks: int) -> NcclTransport:
    """This process' end of the group of ranks [first, first + ranks), connected when first asked for: every rank of it
    must ask. Raises CompatibilityError where this process is none of several ranks, or NCCL is not there."""
    from plugins import gloo

    return _connect(gloo.find_group(first, ranks))


@cache
def _connect(meeting: Any) -> NcclTransport:
    """meeting: the group's end of gloo, over which its first rank tells the others the id that it makes."""
    import torch

    nccl = open_nccl()
    told, heard = (torch.zeros(meeting.ranks * ID_BYTES, dtype=torch.uint8) for _ in range(2))
    if meeting.rank == 0:
        told.copy_(torch.frombuffer(bytearray(nccl.make_id() * meeting.ranks), dtype=torch.uint8))
    sizes = [ID_BYTES] * meeting.ranks
    meeting.exchange(told, heard, sizes, sizes, 0)
    return nccl.connect(heard[:ID_BYTES].numpy().tobytes(), meeting.ranks, meeting.rank)
