"""Conversion against `cp` and `sync` of the same files: bytes of source per second, in one run, alternating.

    python -m benchmarks.convert [--gigabytes 2] [--folder DIR]

The source is a Llama of random bfloat16 weights, read before timing, so that both sides read from memory. Converting to
the same type copies; to float16 it also casts. Both end with the data on the disk. Convert also digests what it wrote,
as the store does. Prints the best of three rounds, the ratio of bests, and the peak memory of the converting process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipeline.checkpoint.safetensors_file import write_safetensors
from pipeline.checkpoint.shards import METADATA, plan_shards, write_index
from pipeline.checkpoint.tensors import RawTensor, TensorInfo

HIDDEN, INTERMEDIATE, VOCAB = 2048, 5504, 32256

WORKER = """
import sys, time
from pathlib import Path
from benchmarks.peak import read_peak
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.workspace import FolderWorkspace

import torch  # imported before the clock starts: a run of several stages pays for it once
begin = time.perf_counter()
folder = CheckpointFolder.open(Path(sys.argv[1]))
convert_checkpoint(folder, FolderWorkspace(Path(sys.argv[2])), dtype=sys.argv[3], overflow="refuse")
print(time.perf_counter() - begin, read_peak() / 2**20)
"""


def write_source(folder: Path, gigabytes: float) -> int:
    """A random Llama of about that size; returns its bytes of weights."""
    per_layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE
    layers = max(1, round((gigabytes * 5e8 - 2 * VOCAB * HIDDEN) / per_layer))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}self_attn.{p}_proj.weight": (HIDDEN, HIDDEN) for p in "qkvo"}
        shapes |= {f"{prefix}mlp.{p}_proj.weight": (INTERMEDIATE, HIDDEN) for p in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes |= {f"{prefix}{p}_layernorm.weight": (HIDDEN,) for p in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    infos = [TensorInfo(name, "BF16", shape) for name, shape in shapes.items()]
    noise = (np.random.default_rng(0).standard_normal(max(i.nbytes for i in infos) // 2) * 0.02).astype(np.float32)
    data = (noise.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    shards = plan_shards(infos)
    for shard in shards:
        tensors = (RawTensor(info.dtype, info.shape, data[: info.nbytes]) for info in shard.infos)
        write_safetensors(folder / shard.name, shard.infos, tensors, metadata=METADATA)
    write_index(folder, shards)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 16384,
        "num_attention_heads": 16,
        "num_hidden_layers": layers,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
        "rope_theta": 100000,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(info.nbytes for info in infos)


def copy(source: Path, target: Path) -> tuple[float, float]:
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", "-f", str(target)], check=True)
    return time.perf_counter() - begin, 0.0


def convert(source: Path, target: Path, dtype: str) -> tuple[float, float]:
    command = [sys.executable, "-c", WORKER, str(source), str(target), dtype]
    seconds, peak = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), float(peak)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        source = Path(scratch) / "source"
        source.mkdir()
        nbytes = write_source(source, arguments.gigabytes)
        os.sync()
        for file in source.iterdir():  # into memory
            file.read_bytes()
        ways: dict[str, Callable[[Path], tuple[float, float]]] = {
            "cp, sync": lambda target: copy(source, target),
            "bfloat16": lambda target: convert(source, target, "bfloat16"),
            "float16": lambda target: convert(source, target, "float16"),
        }
        best = dict.fromkeys(ways, float("inf"))
        peaks = dict.fromkeys(ways, 0.0)
        for _ in range(3):
            for name, way in ways.items():
                target = Path(scratch) / "target"
                seconds, peak = way(target)
                best[name], peaks[name] = min(best[name], seconds), max(peaks[name], peak)
                shutil.rmtree(target)
                os.sync()
    for name, seconds in best.items():
        memory = f", peak {peaks[name]:.0f} MiB" if peaks[name] else ""
        ratio = best["cp, sync"] / seconds
        print(f"{name:>9}: {nbytes / seconds / 1e9:.2f} GB/s, {ratio:.2f}x cp and sync{memory}")


if __name__ == "__main__":
    main()
