"""From an engine checkpoint to TensorRT-LLM 1.2's: config.json and one file per rank, each a step of its own.

The layout is what TensorRT-LLM's 1.2 sources say; it was not run. Memory is one tensor's, or of a stack one expert's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.layouts.scales import WEIGHT_SCALES, find_format
from pipeline.checkpoint.safetensors_file import CHUNK, SafetensorsWriter
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.engine.tensorrt_llm.ask import Ask
from pipeline.engine.tensorrt_llm.rank_config import make_config
from pipeline.engine.tensorrt_llm.rank_quantization import describe_quantization, list_linears
from pipeline.engine.tensorrt_llm.rank_tensors import list_rank_tensors
from pipeline.engine.tensorrt_llm.support import check_support
from pipeline.errors import CheckpointError
from pipeline.progress import SILENT, Progress
from pipeline.quantization.selection import HEAD_NAME
from pipeline.sharding import Rank, layers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.engine.tensorrt_llm.ask import StoredLinear
    from pipeline.network.derived import Derived
    from pipeline.sharding import Parallel
    from pipeline.workspace import Workspace

CONFIG, QUANT_CFG = "config.json", "quant_cfg.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What was written. `unfused_mlp`: the halves of FP8 MLPs have different scales, and trtllm-build's `use_fused_mlp`
    would round one of them again: it is to be disabled. `requantized`: the engine checkpoint's FP8 linears that the
    format itself makes share a scale with another, so that their numbers were rounded once more."""

    quant_algo: str | None
    files: tuple[str, ...]
    nbytes: int
    unfused_mlp: bool
    requantized: tuple[str, ...]


def write_ranks(
    source: CheckpointFolder, workspace: Workspace, *, parallel: Parallel, sm: int, progress: Progress = SILENT
) -> RankReport:
    """Writes the checkpoint into the workspace's folder. A killed run goes on at the rank where it was. `sm`: of the
    GPU that will build, as 90 for 9.0: on it depends the order of weights that TensorRT-LLM does not reorder itself.

    Raises CompatibilityError for what TensorRT-LLM cannot run (support.py), CheckpointError for a folder that is no
    engine checkpoint, StoreError where the disk is too small.
    """
    own = source.own
    if own is None:
        raise CheckpointError(f"{source.path} is no engine checkpoint", hint="convert it first")
    quantized: Mapping[str, Any] = own.quantization or {}
    a, dtype = source.architecture, own.dtype
    linears = list_linears(a, source.tensors)
    head = find_format(source.tensors, HEAD_NAME)
    check_support(Ask(architecture=a, linears=linears, dtype=dtype, parallel=parallel, sm=sm, head=head))
    quantization = describe_quantization(
        linears,
        source.tensors,
        number_locally(a, parallel),
        method=quantized.get("method"),
        cache=quantized.get("kv_cache_quant_algo"),
    )
    documents = {CONFIG: make_config(a, dtype, parallel, quantization)}
    if quantization.quant_cfg is not None:
        documents[QUANT_CFG] = quantization.quant_cfg
    tensors = {
        name_file(rank): list_rank_tensors(source, rank, quantization, dtype=dtype, sm=sm) for rank in parallel.ranks
    }
    sizes = {name: sum(tensor.nbytes for tensor in found.values()) for name, found in tensors.items()}
    workspace.require(sum(size for name, size in sizes.items() if not workspace.is_done(name)))
    progress.start("rank checkpoints", sum(sizes.values()), "B")
    for name, found in tensors.items():
        if workspace.is_done(name):
            progress.advance(sizes[name])
        else:
            _write_rank(workspace, name, found, progress)
    if not workspace.is_done(CONFIG):
        workspace.finish(CONFIG, [_write_json(workspace.path / name, value) for name, value in documents.items()])
    halves = _find_unequal_halves(source, linears)
    return RankReport(
        quant_algo=quantization.algo,
        files=(*documents, *tensors),
        nbytes=sum(sizes.values()),
        unfused_mlp=any(not a.is_routed(linear.place[0]) for linear in halves),
        requantized=tuple(linear.name for linear in halves if a.is_routed(linear.place[0])),
    )


def name_file(rank: Rank) -> str:
    return f"rank{rank.index}.safetensors"


def number_locally(architecture: Architecture, parallel: Parallel) -> Callable[[int], int]:
    """A layer's number -> that within its pipeline stage."""
    stages = (range(*layers(architecture, Rank(parallel, i * parallel.tensor))) for i in range(parallel.pipeline))
    numbers = list(chain.from_iterable(range(len(stage)) for stage in stages))
    return numbers.__getitem__


def _write_rank(workspace: Workspace, name: str, tensors: Mapping[str, Derived], progress: Progress) -> None:
    path = workspace.path / name
    infos = [TensorInfo(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()]
    with SafetensorsWriter(path, infos) as writer:
        for tensor in tensors.values():
            for piece in tensor.pieces():
                for start in range(0, piece.size, CHUNK):
                    part = piece[start : start + CHUNK]
                    writer.write(part)
                    progress.advance(part.size)
    workspace.recognise(path, writer.digest)
    workspace.finish(name, [path])


def _write_json(path: Path, value: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return path


def _find_unequal_halves(source: CheckpointFolder, linears: Sequence[StoredLinear]) -> list[StoredLinear]:
    """The FP8 linears whose scale is smaller than that of the other half of their gated MLP."""
    import numpy as np

    scales = {
        linear.name: float(source.read(f"{linear.name}.{WEIGHT_SCALES}").data.view(np.float32)[0])
        for linear in linears
        if linear.format == "fp8" and linear.name.endswith((".fc", ".gate"))
    }
    others = {name: name[:-2] + "gate" if name.endswith(".fc") else name[:-4] + "fc" for name in scales}
    return [linear for linear in linears if scales.get(linear.name, 0) < scales.get(others.get(linear.name, ""), 0)]
