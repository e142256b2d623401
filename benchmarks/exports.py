"""Exports: how fast each format is written and in how much memory, and how long the same weights take to load as
safetensors and as GGUF.

    python -m benchmarks.exports [--gigabytes 1] [--rounds 5] [--folder DIR]

A Llama of random bfloat16 weights, converted; for the quantized formats rounded to nearest, INT4 in groups of 128.
Loading is by each format's own library, safetensors and gguf, every byte copied by torch (numpy's copies ask for huge
pages, which cost more than the copy where memory is full), from files that are read before; the two take turns, each
in a new process, and the ratio is of their bests. Memory is the peak of the exporting process, torch included.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.convert import write_source
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.workspace import FolderWorkspace

FORMATS = (("hf", "engine"), ("gguf", "engine"), ("awq", "int4"), ("compressed_tensors", "int4"), ("gguf", "int4"))
EXPORT = """
import sys, time
from pathlib import Path
from benchmarks.peak import read_peak
import torch  # imported before the clock starts
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.exports.formats import export_checkpoint
begin = time.perf_counter()
export_checkpoint(CheckpointFolder.open(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3])
print(time.perf_counter() - begin, read_peak() / 2**20)
"""
LOAD = {
    "safetensors": """
import sys, time
from pathlib import Path
import torch
from safetensors import safe_open
begin, used = time.perf_counter(), time.process_time()
held = {}
for path in Path(sys.argv[1]).glob("*.safetensors"):
    with safe_open(path, "pt") as file:
        held |= {name: file.get_tensor(name).clone() for name in file.keys()}
print(time.perf_counter() - begin, time.process_time() - used, sum(tensor.nbytes for tensor in held.values()))
""",
    "GGUF": """
import sys, time
import torch
from gguf import GGUFReader
begin, used = time.perf_counter(), time.process_time()
reader = GGUFReader(sys.argv[1] + "/model.gguf")
held = {tensor.name: torch.from_numpy(tensor.data).clone() for tensor in reader.tensors}
print(time.perf_counter() - begin, time.process_time() - used, sum(tensor.nbytes for tensor in held.values()))
""",
}


def run(script: str, *arguments: object) -> list[float]:
    """The numbers that a script prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return [
        float(number) for number in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    ]


def prepare(folder: Path, gigabytes: float) -> int:
    """engine and int4, two engine checkpoints; the source's bytes of weights."""
    from pipeline.quantization.quantize import quantize_checkpoint
    from pipeline.quantization.settings import QuantizeSettings
    from tests.quantization.support import Settings

    source = folder / "source"
    source.mkdir()
    nbytes = write_source(source, gigabytes)
    engine = FolderWorkspace(folder / "engine")
    convert_checkpoint(CheckpointFolder.open(source), engine, dtype=None, overflow="refuse")
    shutil.rmtree(source)
    every = ("mlp", "attention_output", "attention_input")
    settings: QuantizeSettings = Settings(method="rtn", include=every)
    quantize_checkpoint(CheckpointFolder.open(folder / "engine"), FolderWorkspace(folder / "int4"), settings=settings)
    return nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folder = Path(scratch)
        nbytes = prepare(folder, arguments.gigabytes)
        os.sync()
        for format, source in FORMATS:
            target = folder / f"{format}-{source}"
            seconds, peak = run(EXPORT, folder / source, target, format)
            name = f"{format}, {'16 bits' if source == 'engine' else 'INT4'}"
            read = CheckpointFolder.open(folder / source).nbytes
            print(f"{name:<28} {read / seconds / 1e9:5.2f} GB/s of the checkpoint, peak {peak:5.0f} MiB", flush=True)
        folders = {"safetensors": folder / "hf-engine", "GGUF": folder / "gguf-engine"}
        for each in folders.values():  # into memory
            for file in each.iterdir():
                file.read_bytes()
        best = dict.fromkeys(folders, (float("inf"), float("inf")))
        for _ in range(arguments.rounds):
            for name, path in folders.items():
                seconds, used, held = run(LOAD[name], path)
                if abs(held - nbytes) > 0.01 * nbytes:
                    raise SystemExit(f"{name}: {held:.0f} bytes loaded, {nbytes} in the model")
                best[name] = min(best[name][0], seconds), min(best[name][1], used)
        for name, (seconds, used) in best.items():
            print(f"load {name:<23} {seconds:5.2f} s, {used:.2f} s of CPU, {nbytes / seconds / 1e9:.2f} GB/s")
        wall, cpu = (theirs / ours for ours, theirs in zip(*(best[name] for name in folders), strict=True))
        print(f"GGUF takes {wall:.2f} of safetensors' time, {cpu:.2f} of its CPU seconds")


if __name__ == "__main__":
    main()
