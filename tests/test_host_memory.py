"""Memory of the host, and of a container within it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import host_memory


def use(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "MEMINFO", tree / "meminfo")
    monkeypatch.setattr(host_memory, "CGROUP", tree)
    monkeypatch.setattr(host_memory, "OWN", tree / "cgroup")


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
    use(tmp_path, monkeypatch)
    assert host_memory.read_memory() == expected
    assert host_memory.free_memory() == expected[0]


UNLIMITED = 9223372036854771712  # as version 1 says it
V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


@pytest.mark.parametrize(
    ("own", "files", "groups", "expected"),
    [
        ("4:memory:/a/b", V1, {"memory/a/b": (640 << 20, 40 << 20)}, (600 << 20, 640 << 20)),
        ("4:cpu,memory:/a", V1, {"memory": (UNLIMITED, 9 << 30), "memory/a": (3 << 30, 0)}, (3 << 30, 3 << 30)),
        ("4:memory:/a/b", V1, {"memory/a": (2 << 30, 1 << 30), "memory/a/b": (3 << 30, 0)}, (1 << 30, 2 << 30)),
        ("4:memory:/a/b", V1, {"memory/a": (8 << 30, 7 << 30), "memory/a/b": (3 << 30, 0)}, (1 << 30, 3 << 30)),
        ("4:memory:/docker/x", V1, {"memory": (1 << 30, 1)}, ((1 << 30) - 1, 1 << 30)),
        ("4:memory:/a", V1, {"memory/b": (1 << 30, 1)}, (4 << 30, 16 << 30)),
        ("4:memory:/a", V1, {"memory/a": (UNLIMITED, 1)}, (4 << 30, 16 << 30)),
        ("4:memory:/a\n0::/", V1, {"memory/a": (1 << 30, 0)}, (1 << 30, 1 << 30)),
        ("0::/a/b", V2, {"a": (1 << 30, 0), "a/b": ("max", 0)}, (1 << 30, 1 << 30)),
        ("0::/a/b", V2, {"a": (2 << 30, 0), "a/b": (1 << 30, 2 << 30)}, (0, 1 << 30)),
        ("0::/../..", V2, {"": (1 << 30, 0)}, (1 << 30, 1 << 30)),
    ],
)
def test_the_smallest_of_the_control_groups_around(
    own: str,
    files: tuple[str, str],
    groups: dict[str, tuple[int | str, int]],
    expected: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {4 << 20} kB\n")
    (tmp_path / "cgroup").write_text(f"5:devices:/\n{own}\n")
    for folder, values in groups.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, value in zip(files, values, strict=True):
            (tmp_path / folder / name).write_text(f"{value}\n")
    use(tmp_path, monkeypatch)
    assert host_memory.read_memory() == expected


@pytest.mark.parametrize(
    ("folder", "files", "idle"), [("memory/a", V1, "total_inactive_file"), ("a", V2, "inactive_file")]
)
def test_files_that_were_read_make_way(
    folder: str, files: tuple[str, str], idle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that was read is kept in memory as long as nobody needs it, and the group is charged for it."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {4 << 20} kB\n")
    (tmp_path / "cgroup").write_text("4:memory:/a\n0::/a\n")
    (tmp_path / folder).mkdir(parents=True)
    for name, value in zip(files, (3 << 30, 3 << 30), strict=True):
        (tmp_path / folder / name).write_text(f"{value}\n")
    (tmp_path / folder / "memory.stat").write_text(f"cache 5\n{idle} {2 << 30}\n")
    use(tmp_path, monkeypatch)
    assert host_memory.free_memory() == 2 << 30
