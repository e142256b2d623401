"""TensorRT-LLM checkpoints of a tiny Llama as modelopt and trtseek write them: `python -m benchmarks.rank_peer`.

modelopt's `export_tensorrt_llm_checkpoint` is the writer that TensorRT-LLM's own scripts call, and runs without it.
Compared are the names, types and shapes of every rank's tensors; in 16 bits also every byte. Both quantizers choose
scales of their own, so of quantized weights another thing is counted: modelopt's ranks are read by trtseek's loader
(evaluation/rank_source.py), and each number must be the original weight's, rounded to a step of its scale: an order of
rows, nibbles, groups or q, k and v that were misread would leave next to none.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks import peer_environments
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.evaluation.rank_checkpoint import RankCheckpoint
from pipeline.evaluation.rank_source import JoinedRanks
from tests.engine.tensorrt_llm.rank_cases import make_engine, write

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rope": "default",
    "vocab_size": 512,
}
METHODS = ("plain", "fp8", "awq", "w4a8", "smoothquant")
GROUP = 128  # modelopt's
# Of a step; a number of n steps is off by as many times what 16 bits make of a scale of the input.
HALF, PER_STEP = 0.501, 2.0**-10
HEADERS = (
    "compared",
    "trtseek",
    "modelopt",
    "only trtseek",
    "only modelopt",
    "other type or shape",
    "values",
    "misread",
)
LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(" | ".join(HEADERS))
        plain = make_engine(folder / "original", "llama", "plain", **SIZES)
        for method in METHODS:
            settings = {"group_size": GROUP, "kv_cache": "none"}
            engine = make_engine(folder / method, "llama", method, settings=settings, **SIZES)
            for size in (1, 2):
                theirs, ours = folder / f"{method}{size}-modelopt", folder / f"{method}{size}"
                arguments = [str(folder / method / "hub"), method, str(size), str(theirs)]
                peer_environments.run("modelopt", arguments, folder / "log", script="modelopt_ranks.py")
                write(engine, ours, tensor=size)
                print(" | ".join([f"{method} tensor {size}", *_compare(ours, theirs, plain, size)]), flush=True)


def _compare(ours: Path, theirs: Path, plain: CheckpointFolder, size: int) -> list[str]:
    mine, other = _read_tables(ours, size), _read_tables(theirs, size)
    differing = [key for key in mine.keys() & other.keys() if mine[key] != other[key]]
    adopt_config(theirs, ours)
    joined = JoinedRanks(RankCheckpoint(theirs), sm=90)
    linears = [f"transformer.layers.{layer}.{name}" for layer in range(SIZES["num_hidden_layers"]) for name in LINEARS]
    values = sum(plain.read(f"{base}.weight").to_torch().numel() for base in linears)
    misread = sum(count_misread(joined, plain, base) for base in linears)
    sets = (mine.keys() - other.keys(), other.keys() - mine.keys(), differing)
    equal = ", bytes equal" if _equal_bytes(ours, theirs, size) else ""
    return [str(len(mine)), str(len(other)), *(str(sorted(each)) for each in sets), f"{values:,}", f"{misread}{equal}"]


def adopt_config(theirs: Path, ours: Path) -> None:
    """modelopt's config.json with what it leaves out where TensorRT-LLM is not installed, and without keys of its own
    that describe its export."""
    document = json.loads((theirs / "config.json").read_text())
    whole = json.loads((ours / "config.json").read_text())
    taken = ("use_parallel_embedding", "embedding_sharding_dim", "quantization", "dtype", "vocab_size", "head_size")
    (theirs / "config.json").write_text(json.dumps(whole | {key: document[key] for key in taken}))


def count_misread(joined: JoinedRanks, plain: CheckpointFolder, base: str) -> int:
    """The numbers of a linear that are not the original's, rounded."""
    parts = {
        name.rpartition(".")[2]: joined.read(name).to_torch()
        for name in joined.tensors
        if name.rpartition(".")[0] == base
    }
    wanted, stored = plain.read(f"{base}.weight").to_torch().float(), parts["weight"]
    if "weights_scaling_factor" not in parts:
        return int((wanted != stored.float()).sum())
    if "prequant_scaling_factor" in parts:
        wanted = wanted / parts["prequant_scaling_factor"].float()
    scale = parts["weights_scaling_factor"]
    if stored.shape != wanted.shape:  # INT4 in pairs of rows
        nibbles = torch.stack([stored << 4 >> 4, stored >> 4], dim=1).flatten(0, 1)
        steps = _beyond(wanted / scale.repeat_interleave(GROUP, dim=1), nibbles)
    elif stored.dtype == torch.int8:
        steps = _beyond(wanted / scale[:, None], stored)
    else:  # E4M3: 3 bits of fraction, and below 2^-6 steps of 2^-9
        exact = wanted / scale
        steps = (exact - stored.float()).abs() / exact.abs().clamp(min=2.0**-6).log2().floor().sub(3).exp2()
    return int((steps > HALF).sum())


def _beyond(exact: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    return (exact - stored.float()).abs() - exact.abs() * PER_STEP


def _read_tables(folder: Path, size: int) -> dict[tuple[int, str], tuple[str, list[int]]]:
    found = {}
    for rank in range(size):
        with safe_open(folder / f"rank{rank}.safetensors", "pt") as file:
            for name in sorted(file.keys()):
                part = file.get_slice(name)
                found[rank, name] = (part.get_dtype(), list(part.get_shape()))
    return found


def _equal_bytes(ours: Path, theirs: Path, size: int) -> bool:
    for rank in range(size):
        a, b = (load_file(folder / f"rank{rank}.safetensors") for folder in (ours, theirs))
        if a.keys() != b.keys() or any(not torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a):
            return False
    return True


if __name__ == "__main__":
    main()
