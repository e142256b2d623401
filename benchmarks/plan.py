"""`trtseek plan` of whole models on eight GPUs: what fits, what it will take, and how long planning takes.

    python -m benchmarks.plan [v2-236b v3]

The models are sparse: the hub's names, shapes and files, of no size on disk.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import synthetic
from pipeline.progress import format_amount, format_seconds

FOLDER = Path("out/benchmarks/plan")
ROUNDS, BAR = 5, 0.5
_FITS = {True: "fits", False: "does NOT fit"}
PLAN = """
name: {name}
model: {{path: {model}}}
target: {{gpu: A100-80GB, parallel: {{{parallel}}}}}
output: {output}
stages:
  convert: {{dtype: float16}}
  quantize: {{method: rtn}}
  build:
    max_seq_len: 32768
    max_batch_size: 16
    max_num_tokens: 2048
    generation: [{{batch: 16, length: 4096}}, {{batch: 4, length: 32768}}]
"""
SPLITS = (
    "tensor: 8",
    *(f"tensor: 8, expert: {ranks}" for ranks in (2, 4, 8)),
    "tensor: 4, pipeline: 2",
    *(f"tensor: 4, expert: {ranks}, pipeline: 2" for ranks in (2, 4)),
)


def ask_plan(config: Path) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """The command's run, its wall seconds and its processor seconds."""
    trtseek = str(Path(sys.executable).with_name("trtseek"))
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([trtseek, "plan", str(config), "--json"], capture_output=True, text=True)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return run, seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def time_plan(config: Path) -> None:
    """The first time, when every header is checked, and again, when they are known: the best of ROUNDS."""
    best = {"first": (math.inf, math.inf), "again": (math.inf, math.inf)}
    for _ in range(ROUNDS):
        shutil.rmtree(FOLDER / "out", ignore_errors=True)
        for which, (seconds, spent) in best.items():
            _, took, used = ask_plan(config)
            best[which] = min(seconds, took), min(spent, used)
    told = (f"{which} {seconds:.2f} s, {spent:.2f} s of processor" for which, (seconds, spent) in best.items())
    print(f"  planned: {'; '.join(told)} (bar {BAR} s)")


def plan_models(names: Sequence[str]) -> bool:
    """What `trtseek plan` says of whole models in INT4 on eight GPUs, and how long it takes to."""
    for name in names or ["v2-236b", "v3"]:
        model = synthetic.sparse_hub(FOLDER / name, name)
        config = FOLDER / f"{name}.yaml"
        timed = False
        for parallel in SPLITS:
            config.write_text(PLAN.format(name=name, model=model, parallel=parallel, output=FOLDER / "out"))
            run, _, _ = ask_plan(config)
            print(f"{name}, {parallel}:", flush=True)
            if run.returncode:
                print("  " + run.stderr.splitlines()[0].partition(": ")[2])
                continue
            plan = json.loads(run.stdout)
            memory, host = plan["memory"], plan["host"]
            total, available = memory["total_bytes"] / 2**30, memory["gpu_bytes"] / 2**30
            parts = ", ".join(
                f"{part} {memory[f'{part}_bytes'] / 2**30:.1f}" for part in ("weights", "workspace", "pool")
            )
            print(f"  {parts} GiB; {total:.1f} of {available:.0f} GiB of each GPU: {_FITS[memory['fits']]}")
            print("  largest batch: " + ", ".join(f"{fit['batch']} x {fit['length']}" for fit in memory["largest"]))
            print("  host: " + "; ".join(f"{row['stage']} {format_amount(row['disk_bytes'], 'B')}, "
                                         f"{format_seconds(row['seconds'])}" for row in host["stages"]))  # fmt: skip
            if not timed:
                time_plan(config)
                timed = True
        shutil.rmtree(model)
        config.unlink()
    return True


if __name__ == "__main__":
    sys.exit(0 if plan_models(sys.argv[1:]) else 1)
