"""Freed memory goes back to the system though something above it is in use."""

import subprocess
import sys

SCRIPT = """
import re
from pathlib import Path

import numpy as np

from pipeline.quantization.heap import trim_heap


def resident() -> int:
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])


blocks = [np.ones(12_000) for _ in range(500)]  # 48 MB, each too small for a mapping of its own
last = blocks.pop()
del blocks
before = resident()
trim_heap()
print(before - resident())
"""


def test_freed_memory_is_given_back() -> None:
    given = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert int(given) > 40_000
