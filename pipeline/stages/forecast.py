"""What a run will take of this host, for `plan`: disk from the layout, memory and time from measured rates.

All are estimates. Disk is what the stages will write (`package` links instead of copying where it can). Times are for
two cores that have nothing else to do; what was never measured has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.foreign.counting import HeldKinds, count_bytes
from pipeline.checkpoint.layouts import Kind, layout_for, list_kinds
from pipeline.checkpoint.layouts.scales import count_blocks
from pipeline.checkpoint.tensors import MODEL_DTYPE_BYTES
from pipeline.engine.build_memory import build_memory
from pipeline.engine.limits import STRIPPED
from pipeline.engine.weights import NOTHING_HELD, estimate_weights
from pipeline.quantization.catalog import FORMATS
from pipeline.quantization.selection import Decision, Rules
from pipeline.quantization.settings import count_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.layouts import Mapping as Tensor
    from pipeline.checkpoint.tensors import TensorInfo
    from pipeline.config.schema import Config
    from pipeline.triton.serving_memory import Part

# Measured by `python -m benchmarks.scale memory`: bytes of 16-bit source per second, and peak memory at any size.
CONVERT_RATE, CONVERT_MEMORY = 0.45e9, 270_000_000
ROUND_RATE, ROUND_MEMORY = 0.55e9, 420_000_000
# By `python -m benchmarks.build`: bytes of weights per second, beside the time for each profile of each layer.
BUILD_RATE, SECONDS_PER_LAYER = 0.06e9, 0.4
# By `python -m benchmarks.scale stripped`, likewise: weights are digested, and each is given a program that takes it.
DIGEST_RATE, STRIPPED_SECONDS_PER_LAYER = 0.5e9, 1.0
# … and for each profile, times layers^2.5: what 27 and 60 layers took.
STRIPPED_GROWTH = 0.008
# Bytes of the program for each profile of each layer, with MLA and without: the same runs.
PROGRAM_BYTES = {True: 3_100_000, False: 1_200_000}
FLOAT32 = 4
FP8_TYPES = ("F8_E4M3",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One stage's disk, memory and time. None: not known ahead. scratch_bytes: of the disk, what goes in the end."""

    stage: str
    disk_bytes: int
    memory_bytes: int | None
    seconds: float | None
    scratch_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "disk_bytes": self.disk_bytes,
            "scratch_bytes": self.scratch_bytes,
            "memory_bytes": self.memory_bytes,
            "seconds": None if self.seconds is None else round(self.seconds),
        }


def forecast(
    config: Config,
    architecture: Architecture,
    tensors: Mapping[str, TensorInfo],
    *,
    dtype: str,
    fp8: bool,
    held: HeldKinds = NOTHING_HELD,
) -> list[Forecast]:
    """The stages that write much, in order. fp8: the engine checkpoint keeps the source's FP8 blocks. held: how it
    keeps linears that another tool has quantized."""
    sizes = _Sizes(architecture, tensors, held, MODEL_DTYPE_BYTES[dtype])
    wide = sizes.sum(lambda tensor: _plain_bytes(tensor, dtype))  # the work, whatever the source's type

    def kept_bytes(tensor: Tensor) -> int:
        is_fp8 = fp8 and tensors[tensor.sources[0]].dtype in FP8_TYPES
        return _fp8_bytes(tensor) if is_fp8 else _plain_bytes(tensor, dtype)

    def unquantized_bytes(tensor: Tensor) -> int:
        """Quantization leaves no FP8 in the decoder, and nothing of the MTP layer changed."""
        return kept_bytes(tensor) if tensor.role == "mtp" else _plain_bytes(tensor, dtype)

    converted = sizes.sum_converted(kept_bytes)
    rows = [
        Forecast(
            stage="convert",
            disk_bytes=converted,
            memory_bytes=CONVERT_MEMORY,
            seconds=converted / CONVERT_RATE,
        )
    ]
    rules = config.stages.quantize.rules
    if rules.methods:
        rounds, settings = not rules.measures, config.stages.quantize
        scratch = count_scratch(settings.calibration, architecture.hidden_size) if settings.measures else 0
        rows.append(
            Forecast(
                stage="quantize",
                disk_bytes=sizes.sum_quantized(rules, unquantized_bytes) + scratch,
                scratch_bytes=scratch,
                memory_bytes=ROUND_MEMORY if rounds else None,
                seconds=wide / ROUND_RATE if rounds else None,
            )
        )
    weights = estimate_weights(
        architecture,
        dtype=dtype,
        max_seq_len=config.stages.build.max_seq_len,
        rules=rules,
        fp8=fp8 and not rules.methods,
        held=held,
    )
    if config.target.world.foreign:
        # Rank checkpoints are copied into a job, and come back as an engine; a checkpoint to be loaded is exported.
        stages = ("job", "build") if config.target.backend == "tensorrt_llm" else ("build",)
        return [*rows, *(Forecast(stage=s, disk_bytes=weights, memory_bytes=None, seconds=None) for s in stages)]
    return [*rows, _forecast_build(config, architecture, weights)]


def forecast_serving(
    config: Config, architecture: Architecture, rows: Sequence[Forecast], *, dtype: str
) -> tuple[Part, ...] | None:
    """What serving the package takes of this host's memory, process by process; None where another image serves it.
    `rows`: of `forecast`."""
    from pipeline.stages.network import network_spec
    from pipeline.triton.serving_memory import estimate_planned

    if config.target.world.foreign:
        return None
    spec, parallel = network_spec(config, dtype), config.target.parallel.sizes
    specs = [replace(spec, rank=rank) for rank in parallel.ranks] if parallel.world > 1 else [spec]
    (checkpoint,) = [row for row in rows if row.stage in ("convert", "quantize")][-1:]
    kept = checkpoint.disk_bytes - checkpoint.scratch_bytes
    return estimate_planned(config, architecture, specs, checkpoint_bytes=kept)


def _forecast_build(config: Config, architecture: Architecture, weights: int) -> Forecast:
    build = config.stages.build
    parts = architecture.num_layers * (1 + len(build.profiles))
    program = parts * PROGRAM_BYTES[architecture.latent is not None]
    if build.weights == STRIPPED:
        growth = (1 + len(build.profiles)) * architecture.num_layers**2.5 * STRIPPED_GROWTH
        seconds = weights / DIGEST_RATE + parts * STRIPPED_SECONDS_PER_LAYER + growth
    else:
        seconds = weights / BUILD_RATE + parts * SECONDS_PER_LAYER
    return Forecast(
        stage="build",
        disk_bytes=program + (0 if build.weights == STRIPPED else weights),
        memory_bytes=build_memory(architecture, weights, build.weights),
        seconds=seconds,
    )


class _Sizes:
    """The checkpoint's tensors by kind: those of the decoder, and of the layer for multi-token prediction if the source
    has it, which is converted and never quantized. `e`: bytes of an element of the model's type."""

    def __init__(self, architecture: Architecture, tensors: Mapping[str, TensorInfo], held: HeldKinds, e: int) -> None:
        mtp = [Kind(first=mapping, layers=(None,), experts=1) for mapping in layout_for(architecture).mtp_mappings()]
        kinds = [*list_kinds(architecture), *mtp]
        self.kinds = [kind for kind in kinds if not kind.first.optional or kind.first.sources[0] in tensors]

        self.held, self.e = held, e

    def sum(self, nbytes: Callable[[Tensor], int]) -> int:
        return sum(kind.count * nbytes(kind.first) for kind in self.kinds)

    def sum_converted(self, kept_bytes: Callable[[Tensor], int]) -> int:
        """As `convert` writes them; `kept_bytes` of what no other tool has quantized."""
        total = 0
        for first, count in ((kind.first, kind.count) for kind in self.kinds):
            for held, n in self.held.get(first.target, {None: count}).items():
                nbytes = count_bytes(held, first.target_shape, vector_bytes=self.e) if held else kept_bytes(first)
                total += n * nbytes
        return total

    def sum_quantized(self, rules: Rules, kept_bytes: Callable[[Tensor], int]) -> int:
        """After quantization; `kept_bytes` of what stays as it is."""
        total = 0
        for kind in self.kinds:
            decisions = rules.count(kind) if len(kind.first.target_shape) == 2 else {"": kind.count}
            for decision, count in decisions.items():
                total += count * (_quantized_bytes(kind.first, decision) or kept_bytes(kind.first))
        return total


def _plain_bytes(tensor: Tensor, dtype: str) -> int:
    return math.prod(tensor.target_shape) * (MODEL_DTYPE_BYTES[dtype] if tensor.cast else FLOAT32)


def _fp8_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.target_shape) + math.prod(count_blocks(tensor.target_shape)) * FLOAT32


def _quantized_bytes(tensor: Tensor, decision: Decision | str) -> int:
    """0 for what is not quantized."""
    if isinstance(decision, str):
        return 0
    return FORMATS[decision.format].nbytes(tensor.target_shape, decision.group)
