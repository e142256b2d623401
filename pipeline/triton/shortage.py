"""Whether a server failed because memory ran out, as far as its log and the kernel tell: Triton itself says of a
process that was killed for that no more than that it is not healthy."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.triton.server_log import ServerLog

VMSTAT = Path("/proc/vmstat")
ADVICE = (
    "free some, raise the limit that this runs under, or lower stages.package.max_tokens_in_paged_kv_cache, "
    "stages.build.max_batch_size or the number of instances"
)
TOLD = "memory ran out"
# Processes that the kernel killed before loading them again is given up: one may have been a neighbour's.
MOST_KILLS = 3
# As C++, Python, torch and the C library say it.
_WORDS = re.compile(r"bad_alloc|MemoryError|DefaultCPUAllocator|(?i:cannot allocate memory|out of memory)")


class Shortage:
    """What the log and the kernel say from now on, or from the last `renew` on."""

    def __init__(self, log: ServerLog) -> None:
        self._log = log
        self._before = count_kills()

    def renew(self) -> None:
        """What was said until now explains nothing that fails later."""
        self._log.mark()
        self._before = count_kills()

    @property
    def told(self) -> bool:
        """Whether the server itself says it: whose process the kernel killed is not known."""
        return bool(_WORDS.search(self._log.errors()))

    @property
    def lasts(self) -> bool:
        """Whether another try would not cure it."""
        return self.told or self._killed >= MOST_KILLS

    def describe(self) -> str:
        """In words; nothing where it is not known."""
        if self.told:
            return TOLD
        if killed := self._killed:
            return f"the kernel killed {killed} process(es) meanwhile because memory ran out"
        return ""

    @property
    def _killed(self) -> int:
        return count_kills() - self._before


def count_kills() -> int:
    """Processes that the kernel has killed for want of memory since it was started, in any control group."""
    try:
        found = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
