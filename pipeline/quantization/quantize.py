"""An engine checkpoint to a quantized one, a decoder layer and a shard at a time (`steps`).

Rounding to nearest reads a tensor, packs it and writes it. A method that measures first sends calibration text through
the layer (`calibration`), chooses (`layer`), then packs the same way. Memory: one decoder layer for the latter, one
tensor for the former.
"""

from __future__ import annotations

import shutil
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.engine_config import require_unquantized, write_quantized
from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.layouts.scales import BLOCK_SCALES, FP8, cache_scale
from pipeline.checkpoint.shards import write_index
from pipeline.checkpoint.tensors import release_layer
from pipeline.errors import CompatibilityError, StoreError
from pipeline.progress import SILENT, Progress
from pipeline.quantization import calibration
from pipeline.quantization.calibration import Calibration, sample_pieces
from pipeline.quantization.calibration_files import name_file
from pipeline.quantization.catalog import METHODS, name_algo
from pipeline.quantization.coverage import summarize, warn
from pipeline.quantization.heap import trim_heap
from pipeline.quantization.kv_cache import cache_step
from pipeline.quantization.layer import LayerPlan, group_linears, plan_layer
from pipeline.quantization.linear_inputs import UNROUTED, warn_starved
from pipeline.quantization.report import REPORT, QuantizationReport, describe_config
from pipeline.quantization.rules import choose_linears
from pipeline.quantization.settings import QuantizeSettings, count_scratch
from pipeline.quantization.shard import model_dtype, write_shard
from pipeline.quantization.steps import PARTS, Part, Steps
from pipeline.quantization.threads import bounded_threads

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.tensors import TensorInfo
    from pipeline.quantization.capture import Captured
    from pipeline.quantization.scale_groups import ScaleGroup
    from pipeline.workspace import Workspace


def quantize_checkpoint(
    source: CheckpointFolder, workspace: Workspace, *, settings: QuantizeSettings, progress: Progress = SILENT
) -> QuantizationReport:
    """Writes the quantized engine checkpoint into `workspace`; a killed run goes on at the layer where it was.

    The same source, settings and libraries give the same bytes. Raises CompatibilityError for settings that cannot
    work, CheckpointError for a source that is no 16- or 32-bit engine checkpoint, QuantizationError for what
    calibration or packing meets.
    """
    run = _Run(source, workspace, settings, progress)
    with bounded_threads():
        if not workspace.is_done("report"):
            run.announce()
            for layer, step in run.steps.left(run.steps.layers):
                run.quantize_layer(layer, step)
            for _, step in run.steps.left(run.steps.copied):
                run.copy(step)
            run.finish()
    for folder in (PARTS, calibration.FOLDER):
        shutil.rmtree(workspace.path / folder, ignore_errors=True)
    return QuantizationReport.read(workspace.path / REPORT)


class _Run:
    def __init__(
        self, source: CheckpointFolder, workspace: Workspace, settings: QuantizeSettings, progress: Progress
    ) -> None:
        self.source, self.workspace, self.settings, self.progress = source, workspace, settings, progress
        if settings.unrouted_experts not in UNROUTED:
            raise CompatibilityError(
                f"stages.quantize.unrouted_experts: {settings.unrouted_experts} is no policy",
                hint=f"policies: {', '.join(UNROUTED)}",
            )
        hint = "quantize starts from what convert wrote of 16-bit weights; else set stages.quantize.method: none"
        self.dtype = model_dtype(require_unquantized(source, hint=hint).dtype)
        self.selection = choose_linears(layout_for(source.architecture).mappings(), source.tensors, settings.rules)
        self.steps = Steps(source, workspace)
        self.calibration = Calibration(
            source,
            workspace,
            self._sample,
            samples=settings.calibration.samples,
            length=settings.calibration.length,
            seed=settings.calibration.seed,
            progress=progress,
        )

    def announce(self) -> None:
        """Notes what the rules decided against the wish, and refuses what the disk could not hold."""
        for line in self.selection.describe_smaller():
            self.progress.note(line)
        for pattern in self.selection.idle_patterns:
            self.progress.note(f"exclude pattern {pattern} matches no linear")
        # Too little text is to be told as that, not as what more of it would take.
        if self.measures and any(self.steps.left(self.steps.layers)):
            self.calibration.draw()
        hidden = self.source.architecture.hidden_size
        states = count_scratch(self.settings.calibration, hidden) if self.measures else 0
        left = self.steps.left(list(self.steps.tensors))
        written = sum(self._count_bytes(name) for _, step in left for name in self.steps.tensors[step])
        try:
            self.workspace.require(written + states)
        except StoreError as error:
            if states <= written:
                raise
            c = self.settings.calibration
            raise StoreError(
                f"{error.message}; {states:,} of them are what layers read of {c.samples:,} x {c.length:,} tokens",
                hint=f"lower stages.quantize.calibration.samples or length; or {error.hint}",
            ) from error

    def quantize_layer(self, layer: int, step: str) -> None:
        """Measures, chooses, and writes one layer's shard."""
        groups = self._group(layer, step)
        captured = None
        watched = sorted({group.seen_at for method, group in groups if METHODS[method].measures})
        keeps_cache = self.settings.kv_cache != "none"
        if watched or keeps_cache:
            moments = {group.seen_at for method, group in groups if METHODS[method].moments}
            captured = self.calibration.capture(layer, watched, moments)
            trim_heap()  # of the layer's module
            self.progress.start(f"choosing scales of layer {layer}", len(groups), "groups")
        plan = self._plan(layer, groups, captured, self.progress if captured is not None else SILENT)
        if captured is not None and keeps_cache:
            plan.added[cache_scale(layer)] = cache_step(self.settings.kv_cache, captured.cache_amax)
        plan.coverage = captured.coverage if captured is not None else {}
        self._write(step, plan)
        release_layer(self.source, layer)  # second moments read an expert's linears after those were written
        if captured is not None:
            self.calibration.forget(layer)
            del plan, captured
            trim_heap()

    @cached_property
    def measures(self) -> bool:
        return self.settings.kv_cache != "none" or any(
            METHODS[linear.method].measures for linear in self.selection.linears.values()
        )

    @cached_property
    def quant_algo(self) -> str:
        return name_algo(linear.format for linear in self.selection.linears.values())

    def _count_bytes(self, name: str) -> int:
        """Of what becomes of a source's tensor, at most: what was in FP8 and is not quantized is written in 16 bits."""
        linear, info = self.selection.linears.get(name.removesuffix(".weight")), self.source.tensors[name]
        if linear is not None and name.endswith(".weight"):
            return linear.nbytes
        return info.nbytes * (2 if info.dtype == FP8 else 1)

    def copy(self, step: str) -> None:
        """Writes the tensors of a step that measures nothing, as they are but for the head where that is quantized."""
        self._write(step, self._plan(None, self._group(None, step), None, SILENT))

    def finish(self) -> None:
        """Writes index, config, report and copies of the tokenizer; afterwards nothing is left to do."""
        shards, parts = self.steps.read()
        report = QuantizationReport(
            method=self.settings.method,
            quant_algo=self.quant_algo,
            group_size=self.settings.group_size,
            calibration=self._describe_calibration(),
            linears={name: row for part in parts for name, row in part.linears.items()},
            unquantized=dict(self.selection.kept),
            smaller_groups=self.selection.smaller_groups,
            idle_patterns=list(self.selection.idle_patterns),
            experts={str(layer): part.experts for layer, part in enumerate(parts) if part.experts},
            coverage=summarize({str(layer): part.coverage for layer, part in enumerate(parts) if part.coverage}),
            bytes_before=sum(info.nbytes for info in self.source.tensors.values()),
            bytes_after=sum(shard.nbytes for shard in shards),
        )
        written = [
            self._write_config([info for shard in shards for info in shard.infos]),
            write_index(self.workspace.path, shards),
            *self.source.copy_companions(self.workspace.path),
        ]
        samples = self.settings.calibration.samples if self.measures else None
        for warning in (warn_starved(report.experts), warn(report.coverage, samples)):
            if warning is not None:
                self.progress.note(warning)
        report.write(self.workspace.path / REPORT)
        self.workspace.finish("report", [*written, self.workspace.path / REPORT])

    def _group(self, layer: int | None, step: str) -> list[tuple[str, ScaleGroup]]:
        present = {name.removesuffix(".weight") for name in self.steps.tensors[step]}
        linears = {name: linear for name, linear in self.selection.linears.items() if name in present}
        return group_linears(self.source.architecture, layer, present, linears)

    def _plan(
        self, layer: int | None, groups: list[tuple[str, ScaleGroup]], captured: Captured | None, progress: Progress
    ) -> LayerPlan:
        return plan_layer(
            layer,
            groups,
            self.selection.linears,
            self.source,
            captured,
            dtype=self.dtype,
            clip=self.settings.clip,
            unrouted=self.settings.unrouted_experts,
            progress=progress,
        )

    def _write(self, step: str, plan: LayerPlan) -> None:
        names = self.steps.tensors[step]
        self.progress.start(f"packing {step}", sum(self.source.tensors[name].nbytes for name in names), "B")
        linears = self.selection.linears
        infos = write_shard(self.steps.shard(step), names, self.source, linears, plan, self.progress)
        rows = {name: plan.describe(name) for name in linears if name in plan.rows}
        self.steps.finish(step, infos, Part(linears=rows, experts=plan.experts, coverage=plan.coverage))

    def _sample(self) -> Tensor:
        c = self.settings.calibration
        return sample_pieces(
            self.source, c.files, samples=c.samples, length=c.length, seed=c.seed, progress=self.progress
        )

    def _describe_calibration(self) -> dict[str, Any] | None:
        if not self.measures:
            return None
        c = self.settings.calibration
        files = [name_file(file).path.name for file in c.files]
        return {"files": files, "samples": c.samples, "length": c.length, "seed": c.seed}

    def _write_config(self, infos: Sequence[TensorInfo]) -> Path:
        quantization = describe_config(self.settings, self.quant_algo, self.selection.linears, infos)
        has_fp8 = any(info.name.endswith(BLOCK_SCALES) for info in infos)
        return write_quantized(self.source, self.workspace.path, quantization, has_fp8=has_fp8)
