"""Large models on a small machine: memory that does not grow, engines without weights.

    python -m benchmarks.scale stripped v2-lite      builds without weights at the model's shapes: v2-lite, v2-236b
    python -m benchmarks.scale plugins v2-lite       the same with RoPE, attention and experts as plugins
    python -m benchmarks.scale memory [2 8]          convert, round to nearest and compare, peak memory by size in GB
    python -m benchmarks.scale fp8 [2 6]             the same from FP8 blocks, which convert keeps
    python -m benchmarks.scale workers [2]           16 bits with one process and with two
    python -m benchmarks.scale pack                  INT4 packing on one core

Works under out/benchmarks/scale and cleans up after itself. Nothing needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import synthetic
from benchmarks.bars import hold_flat
from benchmarks.stripped import FOLDER, PLUGINS, build_stripped
from pipeline.progress import format_amount

PACK_BAR = 0.6  # GB/s of 16-bit source on one core
WORKER = """
import sys, time
from pathlib import Path
from benchmarks.peak import read_peak
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.config.settings import Quantize
from pipeline.evaluation.comparison import Plan, compare_subjects
from pipeline.evaluation.subject import open_subject
from pipeline.progress import SILENT
from pipeline.workspace import FolderWorkspace

import torch  # imported before the clock starts: a run of several stages pays for it once
begin = time.perf_counter()
for source, target in zip(sys.argv[2::2], sys.argv[3::2]):
    if sys.argv[1] == "compare":
        plan = Plan(files=[Path("checkpoints/text/heldout.txt")], tokens=512, window=256)
        compare_subjects([open_subject(Path(source)), open_subject(Path(target))], plan, SILENT)
        continue
    folder, workspace = CheckpointFolder.open(Path(source)), FolderWorkspace(Path(target))
    if sys.argv[1] != "rtn":
        dtype = "float16" if sys.argv[1] == "convert" else None
        convert_checkpoint(folder, workspace, dtype=dtype, overflow="refuse")
    else:
        quantize_checkpoint(folder, workspace, settings=Quantize(method="rtn"))
seconds = time.perf_counter() - begin
print(seconds, time.process_time(), read_peak())
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process's work: wall and processor seconds, peak resident bytes, mapped files included."""

    seconds: float
    processor: float
    peak: int


def start(work: str, *folders: Path) -> subprocess.Popen[str]:
    """A process that converts or rounds each source of (source, target, source, target…), or compares the two."""
    command = [sys.executable, "-c", WORKER, work, *map(str, folders)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> Run:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a worker ended with {process.returncode}")
    seconds, processor, peak = output.split()
    return Run(seconds=float(seconds), processor=float(processor), peak=int(peak))


def measure_memory(sizes: Sequence[str]) -> bool:
    """Convert to float16, round to INT4, and compare the two on 512 tokens, by size: peak memory must not follow it."""
    peaks: dict[str, list[int]] = {"convert": [], "rtn": [], "compare": []}
    for gigabytes in map(float, sizes or ("2", "8")):
        source, converted, rounded = (FOLDER / name for name in ("source", "converted", "rounded"))
        nbytes = synthetic.random_moe(source, gigabytes)
        shutil.copyfile("checkpoints/deepseek-v2-tiny/tokenizer.json", source / "tokenizer.json")
        for folder in (converted, rounded):
            shutil.rmtree(folder, ignore_errors=True)
        for work, before, after in (
            ("convert", source, converted),
            ("rtn", converted, rounded),
            ("compare", converted, rounded),
        ):
            run = finish(start(work, before, after))
            peaks[work].append(run.peak)
            print(f"{work:8} {format_amount(nbytes, 'B'):>8} of bfloat16: {run.seconds:6.1f} s, "
                  f"{nbytes / run.seconds / 1e9:5.2f} GB/s ({nbytes / run.processor / 1e9:.2f} per processor second), "
                  f"peak {format_amount(run.peak, 'B')}", flush=True)  # fmt: skip
        for folder in (source, converted, rounded):
            shutil.rmtree(folder)
    return hold_flat(peaks)


def measure_fp8(sizes: Sequence[str]) -> bool:
    """FP8 blocks kept by convert, then rounded to INT4; at each rate, the whole of DeepSeek-V3."""
    peaks: dict[str, list[int]] = {"keep": [], "rtn": []}
    whole = synthetic.count_bytes("v3")
    for gigabytes in map(float, sizes or ("2", "6")):
        source, converted, rounded = (FOLDER / name for name in ("source", "converted", "rounded"))
        nbytes = synthetic.random_fp8(source, gigabytes)
        for work, before, after in (("keep", source, converted), ("rtn", converted, rounded)):
            shutil.rmtree(after, ignore_errors=True)
            run = finish(start(work, before, after))
            peaks[work].append(run.peak)
            print(f"{work:8} {format_amount(nbytes, 'B'):>8} of FP8: {run.seconds:6.1f} s, "
                  f"{nbytes / run.seconds / 1e9:5.2f} GB/s ({nbytes / run.processor / 1e9:.2f} per processor second), "
                  f"peak {format_amount(run.peak, 'B')}; V3's {whole / 1e9:.0f} GB at this rate: "
                  f"{whole / nbytes * run.seconds / 3600:.1f} h, {whole / nbytes * run.processor / 3600:.1f} h of "
                  "processor", flush=True)  # fmt: skip
        for folder in (source, converted, rounded):
            shutil.rmtree(folder)
    return hold_flat(peaks)


def compare_workers(sizes: Sequence[str]) -> bool:
    """Two checkpoints one after the other in one process, and at once in two: what a second worker could win."""
    gigabytes = float(sizes[0]) / 2 if sizes else 1.0
    names = ("a", "b")
    sources = [FOLDER / f"source-{name}" for name in names]
    converted = [FOLDER / f"converted-{name}" for name in names]
    for source in sources:
        size = synthetic.random_moe(source, gigabytes)
    for work, before in (("convert", sources), ("rtn", converted)):
        best = {"one": float("inf"), "two": float("inf")}
        for _ in range(3):
            for way in best:
                after = [FOLDER / f"{'converted' if work == 'convert' else 'rounded'}-{name}" for name in names]
                for folder in after:
                    shutil.rmtree(folder, ignore_errors=True)
                pairs = list(zip(before, after, strict=True))
                began = time.perf_counter()
                if way == "one":
                    finish(start(work, *itertools.chain.from_iterable(pairs)))
                else:
                    for process in [start(work, *pair) for pair in pairs]:
                        finish(process)
                best[way] = min(best[way], time.perf_counter() - began)
        print(f"{work:8} 2 x {format_amount(size, 'B')}: one process {best['one']:.1f} s, two {best['two']:.1f} s, "
              f"{best['one'] / best['two']:.2f}x")  # fmt: skip
    for folder in (*sources, *converted, *(FOLDER / f"rounded-{name}" for name in names)):
        shutil.rmtree(folder)
    return True


def measure_packing(_arguments: Sequence[str]) -> bool:
    """Rounding and packing a V2-Lite expert's weights, [1408, 2048] in bfloat16, over and over on one thread."""
    import torch

    from pipeline.quantization.int4 import quantize_packed

    torch.set_num_threads(1)
    weight = (torch.randn(1408, 2048, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    nbytes = weight.numel() * 2
    best = float("inf")
    for _ in range(50):
        began = time.thread_time()
        quantize_packed(weight, 128, scale_dtype=torch.float16)
        best = min(best, time.thread_time() - began)
    rate = nbytes / best / 1e9
    print(f"INT4 packing: {rate:.2f} GB/s of bfloat16 on one core, processor time, best of 50 (bar {PACK_BAR})")
    return rate >= PACK_BAR


COMMANDS: dict[str, Callable[[Sequence[str]], bool]] = {
    "stripped": build_stripped,
    "plugins": partial(build_stripped, lowering=PLUGINS),
    "memory": measure_memory,
    "fp8": measure_fp8,
    "workers": compare_workers,
    "pack": measure_packing,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs="*")
    arguments = parser.parse_args()
    began = time.monotonic()
    passed = COMMANDS[arguments.command](arguments.arguments)
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
