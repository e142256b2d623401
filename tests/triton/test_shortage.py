"""What tells that memory ran out."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.triton import shortage
from pipeline.triton.shortage import Shortage, count_kills


@pytest.mark.parametrize(
    "line",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "MemoryError: Unable to allocate 9.31 GiB for an array",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_the_log_says_it(line: str) -> None:
    assert Shortage().describe(f"E1130 x\n{line}") == "memory ran out"


def test_the_kernel_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(shortage, "VMSTAT", counts)
    assert count_kills() == 0  # a kernel that does not count
    counts.write_text("oom_kill_other 9\noom_kill 3\nx 1\n")
    since = Shortage()
    assert since.describe("Stub process 'x' is not healthy.") == ""
    counts.write_text("oom_kill 4\n")
    assert since.describe("") == "the kernel killed 1 process meanwhile because memory ran out"
    counts.write_text("oom_kill 5\n")
    assert since.describe("") == "the kernel killed 2 processes meanwhile because memory ran out"
