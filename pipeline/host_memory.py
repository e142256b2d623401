"""How much memory this host has, and how much of it a process may still take: within a container, what that leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MEMINFO, CGROUP, OWN = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of a control group, by version: where its limit is, and what it uses; and what memory.stat calls files that were read
# and are no longer in use: they count as used, and make way.
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def read_memory() -> tuple[int, int]:
    """Available (without swapping) and total bytes, within the limits of the control groups if there are any."""
    lines = (line.split() for line in MEMINFO.read_text(encoding="utf-8").splitlines())
    values = {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines if len(fields) > 1}
    free, total = values["MemAvailable"], values["MemTotal"]
    for limit, used in _read_limits():
        free, total = min(free, limit - used), min(total, limit)
    return max(0, free), total


def free_memory() -> int:
    """Bytes that can be taken."""
    return read_memory()[0]


def _read_limits() -> Iterator[tuple[int, int]]:
    """Limit and use of this process' control group and of those above it, where they have one."""
    for version, folder in dict.fromkeys(_find_groups()):
        limit, used, idle = FILES[version]
        try:
            values = [int((folder / name).read_text(encoding="utf-8")) for name in (limit, used)]
        except (OSError, ValueError):  # no such group is to be seen from here, or it is not limited
            continue
        yield values[0], max(0, values[1] - _read_statistic(folder, idle))


def _read_statistic(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        return int(dict(line.split() for line in lines)[name])
    except (OSError, ValueError, KeyError):
        return 0


def _find_groups() -> Iterator[tuple[int, Path]]:
    """Version and folder. A container often sees only its own group, as the root, whatever it is called outside."""
    roots = {1: CGROUP / "memory", 2: CGROUP}
    yield from roots.items()
    try:
        lines = OWN.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 2 or "memory" in controllers.split(","):
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts), 0, -1):
                yield version, roots[version].joinpath(*parts[:depth])
