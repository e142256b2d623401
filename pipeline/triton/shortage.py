"""Whether a server failed because memory ran out, as far as its log and the kernel tell: Triton itself says of a
process that was killed for that no more than that it is not healthy."""

from __future__ import annotations

import re
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
ADVICE = (
    "free some, raise the limit that this runs under, or lower stages.package.max_tokens_in_paged_kv_cache, "
    "stages.build.max_batch_size or the number of instances"
)
# As C++, Python, torch and the C library say it.
_WORDS = re.compile(r"bad_alloc|MemoryError|DefaultCPUAllocator|(?i:cannot allocate memory|out of memory)")


class Shortage:
    """From now on."""

    def __init__(self) -> None:
        self._before = count_kills()

    def describe(self, errors: str) -> str:
        """In words; nothing where it is not known. `errors`: the log's."""
        if _WORDS.search(errors):
            return "memory ran out"
        if killed := count_kills() - self._before:
            return f"the kernel killed {killed} process{'es'[: 2 * (killed > 1)]} meanwhile because memory ran out"
        return ""


def count_kills() -> int:
    """Processes that the kernel has killed for want of memory since it was started, in any control group."""
    try:
        found = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
