"""How fast the command line answers: `--help`, `validate`, `engine` from nothing and fully cached.

    python -m benchmarks.commands [--config a100-int4.yaml] [--repeat 7]

Prints the median and the minimum of whole processes, beside their bar and a bare `python -c pass`, which says how fast
this machine starts Python at all. The run from nothing uses an output folder of its own, removed afterwards.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRTSEEK = str(Path(sys.executable).with_name("trtseek"))


def time_command(command: list[str], repeat: int) -> list[float]:
    """Seconds of each of `repeat` runs of a whole process; it must exit with 0."""
    seconds = []
    for _ in range(repeat):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="a100-int4.yaml")
    parser.add_argument("--repeat", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trtseek-bench-") as folder:
        engine = [TRTSEEK, "engine", arguments.config, "--set", f"output={folder}"]
        rows = [
            ("python -c pass", [sys.executable, "-c", "pass"], arguments.repeat, None),
            ("trtseek --help", [TRTSEEK, "--help"], arguments.repeat, 0.2),
            ("trtseek validate", [TRTSEEK, "validate", arguments.config], arguments.repeat, 0.5),
            ("trtseek engine, nothing cached", engine, 1, 180.0),
            ("trtseek engine, fully cached", engine, arguments.repeat, 1.5),
        ]
        print(f"{'command':<32} {'median s':>9} {'min s':>7} {'bar s':>7}")
        for name, command, repeat, bar in rows:
            seconds = time_command(command, repeat)
            limit = f"{bar:>7.1f}" if bar else f"{'-':>7}"
            print(f"{name:<32} {statistics.median(seconds):>9.3f} {min(seconds):>7.3f} {limit}", flush=True)


if __name__ == "__main__":
    main()
