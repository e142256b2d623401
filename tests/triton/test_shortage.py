"""What tells that memory ran out."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.triton import shortage
from pipeline.triton.server_log import ServerLog
from pipeline.triton.shortage import Shortage, count_kills


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.mark.parametrize(
    "line",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "MemoryError: Unable to allocate 9.31 GiB for an array",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_the_log_says_it(log: Path, line: str) -> None:
    log.write_text(f"E1130 x\n{line}\n")
    since = Shortage(ServerLog(log))
    assert since.told and since.lasts
    assert since.describe() == "memory ran out"
    since.renew()  # it serves
    with open(log, "a") as file:
        file.write("E1130 the process got signal 11\n")
    assert not since.told
    assert since.describe() == ""


def test_the_kernel_says_it(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of which process: a neighbour's is not told apart, but what was before the server served does not count."""
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(shortage, "VMSTAT", counts)
    assert count_kills() == 0  # a kernel that does not count
    counts.write_text("oom_kill_other 9\noom_kill 3\nx 1\n")
    since = Shortage(ServerLog(log))
    assert since.describe() == ""
    counts.write_text("oom_kill 5\n")
    assert since.describe() == "the kernel killed 2 process(es) meanwhile because memory ran out"
    assert not since.told and not since.lasts
    counts.write_text("oom_kill 6\n")
    assert since.lasts
    since.renew()
    assert since.describe() == "" and not since.lasts
