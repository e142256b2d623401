"""What the processes of a server take of memory."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path


def list_processes(root: int) -> dict[int, str]:
    """Command lines by process id: of the process, and all that descend from it."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat[1]) if stat[0] != "Z" else 0
    found, changed = {root}, True
    while changed:
        new = {pid for pid, parent in parents.items() if parent in found} - found
        found |= new
        changed = bool(new)
    return {pid: commands[pid] for pid in found if pid in commands}


def measure_memory(root: int) -> dict[str, list[int]]:
    """Pss of each process, in bytes, by what it is: as pipeline.triton.footprint names it."""
    taken: dict[str, list[int]] = defaultdict(list)
    for pid, command in list_processes(root).items():
        (kilobytes,) = re.findall(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        taken[_name(pid, command)].append(int(kilobytes) << 10)
    return dict(taken)


def _name(pid: int, command: str) -> str:
    if match := re.search(r"/([^/ ]+)/\d+/model\.py", command):
        return match[1]
    known = {"rank_process": "tensorrt_llm", "keeper.py": "keeper", "bin/tritonserver ": "tritonserver"}
    return next((name for word, name in known.items() if word in command), f"{pid}: {command[:80]}")
