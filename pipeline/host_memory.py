"""How much memory this host has, and how much of it a process may still take: within a container, what that leaves."""

from __future__ import annotations

from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def read_memory() -> tuple[int, int]:
    """Available (without swapping) and total bytes, within the limit of the control group if there is one."""
    lines = (line.split() for line in MEMINFO.read_text(encoding="utf-8").splitlines())
    values = {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines if len(fields) > 1}
    free, total = values["MemAvailable"], values["MemTotal"]
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="utf-8").strip()
        used = int((CGROUP / "memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return free, total
    return (max(0, min(free, int(limit) - used)), min(total, int(limit))) if limit.isdigit() else (free, total)


def free_memory() -> int:
    """Bytes that can be taken."""
    return read_memory()[0]
