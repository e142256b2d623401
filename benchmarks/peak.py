"""How much memory a process held at most; what benchmarks start in processes of their own asks this at its end."""

from __future__ import annotations

import re
from pathlib import Path


def read_peak() -> int:
    """Bytes resident at most in this process, mapped files included (VmHWM)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError("/proc/self/status has no VmHWM")
    return int(found[1]) * 1024
