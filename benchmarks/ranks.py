"""Writing TensorRT-LLM rank checkpoints against `cp` and `sync` of the engine checkpoint, in one run, alternating.

    python -m benchmarks.ranks [--gigabytes 8] [--tensor 8] [--method plain|int4] [--folder DIR]

The engine checkpoint is a Llama's, of random bfloat16 weights, or of those rounded to INT4 in groups of 64; it is read
before timing, so that both sides read from memory, and both end with the data on the disk. The writer also digests what
it wrote, as the store does. Prints the best of three rounds of each, bytes written per second over bytes copied per
second, and the peak memory of the writing process; then the proof's time and peak, once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.convert import copy, write_source
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests.quantization.support import Settings

ROUNDS = 3
ALL = ("mlp", "attention_output", "attention_input")
WORKER = """
import sys, time
from pathlib import Path
from benchmarks.peak import read_peak
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.engine.tensorrt_llm.ranks import write_ranks
from pipeline.sharding import Parallel
from pipeline.workspace import FolderWorkspace

import torch  # imported before the clock starts: a run of several stages pays for it once
begin = time.perf_counter()
source = CheckpointFolder.open(Path(sys.argv[1]))
write_ranks(source, FolderWorkspace(Path(sys.argv[2])), parallel=Parallel(tensor=int(sys.argv[3])), sm=90)
print(time.perf_counter() - begin, read_peak() / 2**20)
"""
PROVER = """
import sys, time
from pathlib import Path
from benchmarks.peak import read_peak
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.evaluation.rank_proof import prove_ranks

begin = time.perf_counter()
proof = prove_ranks(Path(sys.argv[2]), CheckpointFolder.open(Path(sys.argv[1])), sm=90)
assert proof.holds and proof.logits == 0, proof.differing
print(time.perf_counter() - begin, read_peak() / 2**20)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--tensor", type=int, default=8)
    parser.add_argument("--method", choices=("plain", "int4"), default="plain")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source = prepare(folder, arguments.gigabytes, arguments.method)
        copied, written, peaks = [], [], []
        for _ in range(ROUNDS):
            subprocess.run(["cat", *map(str, source.shards)], stdout=subprocess.DEVNULL, check=True)
            copied.append(copy(source.path, folder / "copy")[0])
            shutil.rmtree(folder / "copy")
            os.sync()
            seconds, peak = run(WORKER, source.path, folder / "ranks", str(arguments.tensor))
            written.append(seconds)
            peaks.append(peak)
            size = sum(file.stat().st_size for file in (folder / "ranks").glob("*.safetensors"))
            if len(written) < ROUNDS:
                shutil.rmtree(folder / "ranks")
        copy_speed, rank_speed = source.nbytes / min(copied) / 1e9, size / min(written) / 1e9
        print(f"engine checkpoint {source.nbytes / 1e9:.2f} GB, {arguments.tensor} ranks {size / 1e9:.2f} GB")
        print(f"cp and sync {copy_speed:.2f} GB/s, ranks {rank_speed:.2f} GB/s, ratio {rank_speed / copy_speed:.2f}")
        print(f"peak {max(peaks):.0f} MiB")
        print("proof {:.1f} s, peak {:.0f} MiB".format(*run(PROVER, source.path, folder / "ranks")))


def prepare(folder: Path, gigabytes: float, method: str) -> CheckpointFolder:
    """The engine checkpoint. INT4 takes four times as much to start from."""
    (folder / "hub").mkdir()
    write_source(folder / "hub", gigabytes * (1 if method == "plain" else 3.5))
    hub = CheckpointFolder.open(folder / "hub")
    convert_checkpoint(hub, FolderWorkspace(folder / "engine"), dtype=None, overflow="refuse")
    shutil.rmtree(folder / "hub")
    engine = CheckpointFolder.open(folder / "engine")
    if method == "plain":
        return engine
    settings = Settings(method="rtn", group_size=64, include=ALL)
    quantize_checkpoint(engine, FolderWorkspace(folder / "quantized"), settings=settings)
    shutil.rmtree(folder / "engine")
    return CheckpointFolder.open(folder / "quantized")


def run(program: str, *arguments: object) -> tuple[float, float]:
    """(seconds, peak MiB) that the program prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    seconds, peak = map(float, output.split())
    return seconds, peak


if __name__ == "__main__":
    main()
