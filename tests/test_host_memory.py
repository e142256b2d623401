"""Memory of the host, and of a container within it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import host_memory


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (None, None, (4 << 30, 16 << 30)),
        ("max", "1", (4 << 30, 16 << 30)),
        (str(3 << 30), str(1 << 30), (2 << 30, 3 << 30)),
        (str(3 << 30), str(4 << 30), (0, 3 << 30)),
        (str(99 << 30), "1", (4 << 30, 16 << 30)),
        ("nonsense", "1", (4 << 30, 16 << 30)),
    ],
)
def test_the_smaller_of_host_and_container(
    limit: str | None, used: str | None, expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {4 << 20} kB\nHugePages_Total: 0\n")
    if limit is not None and used is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    assert host_memory.read_memory() == expected
    assert host_memory.free_memory() == expected[0]
