"""NCCL's calls against a stand-in for the library, which remembers them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import plugins.nccl
from pipeline.errors import CompatibilityError
from plugins.carried import Carried
from plugins.driver import Driver, Function
from plugins.moe_all_to_all.operation import MoeCombine, MoeDispatch
from plugins.nccl import Nccl, find_group, open_nccl
from plugins.tensorrt_plugin import run_launches
from plugins.transport import Bytes, Traffic
from tests.plugins.test_driver import FakeCuda

UNIQUE = bytes(range(128))
# Rank 1 of 2 sends 2 rows to rank 0 and 1 to itself, and gets 3 from rank 0 and its own.
COUNTS = [2, 1, 3, 1]


class FakeNccl:
    """refuse: the call that answers with an error. moved: (call, address, bytes, rank)."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse, self.calls, self.moved = refuse, [], []  # type: ignore[var-annotated]
        self.ncclGetErrorString = self.name_error

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in ("ncclSend", "ncclRecv"):
                address, size, kind, peer, handle, stream = (argument.value for argument in arguments)
                assert (kind, handle, stream) == (1, 77, 5)
                self.moved.append((name, address, size, peer))
            elif name == "ncclGetUniqueId":
                ctypes.memmove(arguments[0], UNIQUE, 128)
            elif name == "ncclCommInitRank":
                handle, ranks, unique, rank = arguments
                assert (bytes(unique), ranks.value) == (UNIQUE, 2) and rank.value in (0, 1)
                handle._obj.value = 77
            return 5 if name == self.refuse else 0

        return call

    class name_error:  # noqa: N801 (a function with attributes, as ctypes has)
        restype: Any = None

        def __new__(cls, status: int) -> Any:
            return b"unhandled system error"


class CountingCuda(FakeCuda):
    """Whose memory holds COUNTS, wherever it is read."""

    def on_cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> None:  # noqa: N802
        assert (size.value, stream.value) == (16, 5)
        target[:] = COUNTS


class Gloo:
    """Rank 1's end of ranks 4 and 5, where rank 0 of the two has an id for it."""

    ranks, rank, traffic = 2, 1, Traffic()

    def exchange(
        self, source: torch.Tensor, target: torch.Tensor, sends: list[int], receives: list[int], stream: int
    ) -> None:
        assert sends == receives == [128, 128] and len(source) == 256
        target[:128] = torch.tensor(list(UNIQUE), dtype=torch.uint8)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    library, gloo = FakeNccl(), Gloo()
    monkeypatch.setattr(plugins.nccl, "open_nccl", lambda: Nccl(library))
    monkeypatch.setattr("plugins.gloo.find_group", lambda first, ranks: {(4, 2): gloo}[first, ranks])
    return library


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CountingCuda:
    cuda = CountingCuda()
    monkeypatch.setattr("plugins.tensorrt_plugin.open_driver", lambda: Driver(cuda))
    monkeypatch.setattr("plugins.tensorrt_plugin.find_sm", lambda: 90)
    return cuda


def carry(count: int) -> Carried:
    return Carried({(i, 90): Function(ptx=b"", entry=f"kernel{i}", threads=32, shared=0) for i in range(count)})


def test_rows_go_in_their_true_numbers(group: FakeNccl, cuda: CountingCuda) -> None:
    op = MoeDispatch(dtype="float16", payload="model", first=4, ranks=2, experts=4, top_k=1, hidden=8)
    shapes = [(3, 8), (3, 1), (3, 1)]
    messages, came, _ = op._scratch(3)
    run_launches(op, carry(3), shapes, [1, 2, 3], [10, 20, 30, 40, 5000], 10_000, 5)
    size = op.message.bytes
    assert size == 32
    assert group.moved == [
        ("ncclSend", 5000, 4, 0),
        ("ncclSend", 5004, 4, 1),
        ("ncclRecv", 5008, 4, 0),
        ("ncclRecv", 5012, 4, 1),
        ("ncclSend", 10_000 + messages, 2 * size, 0),
        ("ncclSend", 10_000 + messages + 2 * size, size, 1),
        ("ncclRecv", 10_000 + came, 3 * size, 0),
        ("ncclRecv", 10_000 + came + 3 * size, size, 1),
    ]
    assert group.calls.count("ncclGroupStart") == group.calls.count("ncclGroupEnd") == 2
    work = [call for call in cuda.calls if call in ("cuLaunchKernel", "cuStreamSynchronize")]
    assert work == ["cuLaunchKernel", "cuLaunchKernel", "cuStreamSynchronize", "cuLaunchKernel"]
    assert find_group(4, 2).traffic.take() == {"counts": Bytes(4, 4), "dispatch": Bytes(2 * size, 3 * size)}


def test_rows_come_back_the_other_way(group: FakeNccl, cuda: CountingCuda) -> None:
    op = MoeCombine(dtype="float16", first=4, ranks=2, experts=4, top_k=1, hidden=8)
    run_launches(op, carry(1), [(6, 8), (3, 1), (2, 2)], [100, 200, 300], [400], 10_000, 5)
    assert group.moved == [
        ("ncclSend", 100, 48, 0),
        ("ncclSend", 148, 16, 1),
        ("ncclRecv", 10_000, 32, 0),
        ("ncclRecv", 10_032, 16, 1),
    ]
    assert find_group(4, 2).traffic.take() == {"combine": Bytes(48, 32)}


def test_nothing_is_sent_to_a_rank_that_gets_nothing(
    group: FakeNccl, cuda: CountingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.plugins.test_nccl.COUNTS", [0, 2, 0, 2])
    op = MoeCombine(dtype="float16", first=4, ranks=2, experts=4, top_k=1, hidden=8)
    run_launches(op, carry(1), [(6, 8), (3, 1), (2, 2)], [100, 200, 300], [400], 10_000, 5)
    assert group.moved == [("ncclSend", 100, 32, 1), ("ncclRecv", 10_000, 32, 1)]


def test_what_nccl_says_is_told() -> None:
    with pytest.raises(CompatibilityError, match="ncclCommInitRank failed: unhandled system error"):
        Nccl(FakeNccl("ncclCommInitRank")).connect(UNIQUE, 2, 1)


def test_a_group_is_connected_once_by_the_id_of_its_first_rank(group: FakeNccl) -> None:
    assert find_group(4, 2) is find_group(4, 2)
    assert find_group(4, 2).handle.value == 77
    assert group.calls == ["ncclCommInitRank"]


def test_the_first_rank_makes_the_id(group: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    class First(Gloo):
        rank = 0

        def exchange(
            self, source: torch.Tensor, target: torch.Tensor, sends: list[int], receives: list[int], stream: int
        ) -> None:
            told.append(bytes(source.tolist()))
            target.copy_(source)

    first = First()
    monkeypatch.setattr("plugins.gloo.find_group", lambda *_: first)
    find_group(4, 2)
    assert told == [UNIQUE * 2]
    assert group.calls == ["ncclGetUniqueId", "ncclCommInitRank"]


def test_ranks_that_are_none_are_refused() -> None:
    with pytest.raises(CompatibilityError, match="ranks 4 to 5 exchange rows, and this process is none of several"):
        find_group(4, 2)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    open_nccl.cache_clear()
    with pytest.raises(CompatibilityError, match=r"libnccl\.so\.2 is not found: .*cannot open shared object"):
        open_nccl()
