"""What serving a package on this host takes of its memory, process by process: estimated from what is started.

Pss, that is with the share that each process has of what it shares, measured once requests were answered: see "Memory
of a server" in benchmarks/RESULTS.md. What requests at hand take is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline import host_memory
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.tensors import MODEL_DTYPE_BYTES
from pipeline.network import inputs
from pipeline.progress import format_amount
from pipeline.triton.backend.belonging import describe
from pipeline.triton.backend.loading import count_affordable, count_wanted, pick_runner
from pipeline.triton.backend.rehearsal import plan_rehearsal
from pipeline.triton.package import EXECUTOR, Package, Rehearsal, read_configs, read_parameters

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.network.spec import NetworkSpec

_MIB = 1 << 20
# `trtseek serve` with its doors, the keeper, and tritonserver.
_OWN = {"trtseek serve": 75 * _MIB, "keeper": 7 * _MIB, "tritonserver": 45 * _MIB}
# A process with a tokenizer, and what that takes for each token it knows.
_TEXT, _TOKEN = 50 * _MIB, 900
# The executor's process, or another rank's, with torch and TensorRT, without the model.
_EXECUTOR = 270 * _MIB
# What a byte of the checkpoint takes in the interpreter, by mode: mapped, read into the network, and as the kernels
# want it. Of INT4, the most; 16 bits take 4.5 in every mode. A mode that is none is for loading to refuse.
_WEIGHTS = {"fast": 5, "exact": 11, "declared": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """So many processes of one name, which take so many bytes together."""

    name: str
    processes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What the interpreter holds, over all ranks; nothing of it where the model is on a GPU. Bytes."""

    vocab_size: int
    weights: int = 0
    pools: int = 0
    ranks: int = 1


def estimate_memory(package: Package, rehearsal: Rehearsal | None = None) -> tuple[Part, ...]:
    """`rehearsal`: what stands in for an engine of TensorRT-LLM's. Raises PackageError, CheckpointError or BuildError
    where the package's files cannot be read."""
    configs = read_configs(package.repository)
    model = _describe_model(package, read_parameters(configs[EXECUTOR]), rehearsal)
    parts = [Part(name=name, processes=1, nbytes=nbytes) for name, nbytes in _OWN.items()]
    for name, count in count_processes(configs).items():
        each = _TEXT + _TOKEN * model.vocab_size
        if name == EXECUTOR:
            count, each = model.ranks, _EXECUTOR + (model.weights + model.pools) // model.ranks
        parts.append(Part(name=name, processes=count, nbytes=count * each))
    return tuple(parts)


def compare_with_free(parts: Sequence[Part]) -> tuple[str, bool]:
    """What they may need and what is free, in words, and whether it fits."""
    needed, processes = sum(part.nbytes for part in parts), sum(part.processes for part in parts)
    free = host_memory.free_memory()
    words = (
        f"its {processes} processes may need {format_amount(needed, 'B')} of memory, and {format_amount(free, 'B')} "
        "are free"
    )
    return words, needed <= free


def count_processes(configs: Mapping[str, Any]) -> dict[str, int]:
    """Processes by model, from ModelConfigs by name: one for each instance; of an ensemble of Triton's, none."""
    return {
        name: sum(group.count or 1 for group in config.instance_group) or 1
        for name, config in configs.items()
        if config.platform != "ensemble"
    }


def _describe_model(package: Package, parameters: Mapping[str, str], rehearsal: Rehearsal | None) -> _Model:
    folder = package.repository / EXECUTOR
    checkpoint = CheckpointFolder.open(
        (folder / parameters["checkpoint_path"]).resolve() if rehearsal is None else rehearsal.checkpoint
    )
    architecture = checkpoint.architecture
    if rehearsal is None:
        if pick_runner(parameters.get("runner", "auto")) == "engine":
            return _Model(vocab_size=architecture.vocab_size)
        description, mode = describe(folder, parameters), parameters.get("interpreter_mode", "fast")
        specs, limits = [rank.spec for rank in description.all_ranks], description.limits
        wanted = count_wanted(limits, parameters)
    else:
        mode = rehearsal.mode
        spec, limits, wanted = plan_rehearsal(package.folder / parameters["gpt_model_path"], parameters, architecture)
        specs = [spec]
    block = _measure_block(architecture, specs, mode)
    return _Model(
        vocab_size=architecture.vocab_size,
        weights=_WEIGHTS.get(mode, max(_WEIGHTS.values()))
        * sum(file.stat().st_size for file in checkpoint.files if file.suffix == ".safetensors"),
        pools=block * min(wanted, limits.max_blocks, count_affordable(block)),
        ranks=len(specs),
    )


def _measure_block(architecture: Architecture, specs: Sequence[NetworkSpec], mode: str) -> int:
    """Bytes that a KV block takes, in the pools of all ranks together, at most: fast mode holds 16 bits in 16 where the
    processor multiplies them fast. Loading knows that by torch, which would take three times what `serve` itself does.
    """
    total = 0
    for port in (port for spec in specs for port in inputs.pools(architecture, spec)):
        declared = MODEL_DTYPE_BYTES.get(port.dtype, 1)  # 8-bit caches are not the model's type
        width = declared if mode == "declared" or declared == 1 else MODEL_DTYPE_BYTES["float32"]
        total += math.prod(port.resolve({"NB": 1})) * width
    return total
