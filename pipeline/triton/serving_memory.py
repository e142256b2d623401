"""What a server takes of this host's memory, process by process: computed from what is to be served.

Pss, that is with the share that each process has of what it shares, measured once requests were answered: see "Memory
of a server" in benchmarks/RESULTS.md. What requests at hand take is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline import host_memory
from pipeline.checkpoint.tensors import MODEL_DTYPE_BYTES
from pipeline.network import inputs
from pipeline.progress import format_amount
from pipeline.triton.backend.loading import count_affordable, count_wanted, pick_runner
from pipeline.triton.model_config import EXECUTOR, count_instances

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.config.schema import Config
    from pipeline.engine.limits import BuildLimits
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
class Model:
    """What the interpreter holds, over all ranks; nothing of it where the model is on a GPU. Bytes."""

    vocab_size: int
    weights: int = 0
    pools: int = 0
    ranks: int = 1


def estimate_planned(
    config: Config, architecture: Architecture, specs: Sequence[NetworkSpec], *, checkpoint_bytes: int
) -> tuple[Part, ...]:
    """Of a package of flavour trtseek that is not made yet. `specs`: the network of each rank;
    `checkpoint_bytes`: of the engine checkpoint's weights."""
    package, limits = config.stages.package, config.stages.build.limits()
    model = Model(vocab_size=architecture.vocab_size, ranks=len(specs))
    if pick_runner(package.runner) == "interpreter":
        tokens = package.max_tokens_in_paged_kv_cache
        wanted = count_wanted(limits, {} if tokens is None else {"max_tokens_in_paged_kv_cache": str(tokens)})
        model = measure_model(architecture, specs, limits, wanted, package.interpreter_mode, checkpoint_bytes)
    return list_parts(count_instances(config), model)


def list_parts(processes: Mapping[str, int], model: Model) -> tuple[Part, ...]:
    parts = [Part(name=name, processes=1, nbytes=nbytes) for name, nbytes in _OWN.items()]
    for name, count in processes.items():
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


def measure_model(
    architecture: Architecture,
    specs: Sequence[NetworkSpec],
    limits: BuildLimits,
    wanted: int,
    mode: str,
    checkpoint_bytes: int,
) -> Model:
    """`wanted`: KV blocks that the model is to have where memory allows."""
    block = _measure_block(architecture, specs, mode)
    return Model(
        vocab_size=architecture.vocab_size,
        weights=_WEIGHTS.get(mode, max(_WEIGHTS.values())) * checkpoint_bytes,
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
