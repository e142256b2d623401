"""Where quantization hurts: each unit of each layer quantized alone, in every candidate form.

What the hidden states after the layer move by is measured; what that does to the logits is estimated from gradients
(`gradients`), so that no later layer has to run again: the cost is linear in layers. The estimate of the mean KL
divergence is the mean over positions of (g·d)²/2: changes at different positions are taken to act by themselves. The
square of a sample's whole sum would not take that, and has many times the noise.

Files in the workspace: the states of all layers, gradients at one layer, a part per finished layer. A killed run goes
on at the layer where it was. Memory: two decoder layers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pipeline.checkpoint.engine_config import require_unquantized
from pipeline.checkpoint.tensors import release_layer
from pipeline.progress import SILENT, Progress
from pipeline.quantization import calibration
from pipeline.quantization.catalog import FORMATS, METHODS
from pipeline.quantization.options import Candidate, Effort
from pipeline.quantization.overlay import Overlay, lay_over
from pipeline.quantization.propagation import FOLDER, Propagation
from pipeline.quantization.scale_groups import scale_groups
from pipeline.quantization.shard import model_dtype
from pipeline.quantization.units import Unit, list_units

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.quantization.capture import Captured
    from pipeline.quantization.hidden_states import HiddenStates
    from pipeline.quantization.rules import Linear
    from pipeline.quantization.scale_groups import ScaleGroup
    from pipeline.quantization.settings import QuantizeSettings
    from pipeline.workspace import Workspace

REPORT = "sensitivity.json"
OUTLIER = 8.0  # of 16 samples of SmolLM2-135M one was 1,000 times the median


def measure_sensitivity(
    source: CheckpointFolder,
    workspace: Workspace,
    *,
    settings: QuantizeSettings,
    candidates: Sequence[Candidate],
    effort: Effort,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Writes and returns sensitivity.json. The first candidate is the one that whole layers are measured with.

    Raises what `quantize_checkpoint` raises.
    """
    path = workspace.path / REPORT
    if not workspace.is_done("sensitivity"):
        run = _Run(source, workspace, settings, candidates, effort, progress)
        for layer in reversed(range(source.architecture.num_layers)):
            if not workspace.is_done(f"sensitivity-{layer}"):
                run.measure(layer)
        path.write_text(json.dumps(run.collect(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        workspace.finish("sensitivity", [path])
    for folder in (FOLDER, calibration.FOLDER):
        shutil.rmtree(workspace.path / folder, ignore_errors=True)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


class _Run:
    def __init__(
        self,
        source: CheckpointFolder,
        workspace: Workspace,
        settings: QuantizeSettings,
        candidates: Sequence[Candidate],
        effort: Effort,
        progress: Progress,
    ) -> None:
        self.source, self.workspace, self.settings, self.progress = source, workspace, settings, progress
        self.candidates, self.effort = candidates, effort
        self.dtype = model_dtype(require_unquantized(source, hint="sensitivity starts from what convert wrote").dtype)
        self.units: dict[int, list[Unit]] = {layer: [] for layer in range(source.architecture.num_layers)}
        for unit in list_units(source.architecture, source.tensors, settings.rules):
            self.units[unit.layer].append(unit)
        self.propagation = Propagation(
            source,
            workspace,
            files=settings.calibration.files,
            effort=effort,
            seed=settings.calibration.seed,
            progress=progress,
        )

    def measure(self, layer: int) -> None:
        """Writes the gradients below a layer and its part of the report."""
        above = self.propagation.gradients_above(layer)
        self.propagation.require_states(layer)
        self.propagation.require_states(layer + 1)
        captured = self._capture(layer)
        variants = self._list_variants(layer)
        self.progress.start(f"sensitivity of layer {layer}", len(variants), "variants")
        part = []
        for unit, candidate, linears in variants:
            overlay = self._lay_over(layer, linears, captured)
            part.append(
                {
                    "unit": unit.place if unit else None,
                    "candidate": candidate.name,
                    "bytes": overlay.nbytes(linears),
                    **self._compare(layer, overlay, above),
                }
            )
            self.progress.advance(1)
        path = self._part(layer)
        path.write_text(json.dumps(part), encoding="utf-8")
        self.workspace.finish(f"sensitivity-{layer}", [path])
        if layer:
            self.propagation.gradients_above(layer - 1)
        for states in (*above, self.propagation.states(layer + 1)):
            states.path.unlink(missing_ok=True)
        for done in (layer, layer + 1):  # the gradients went through the one above
            release_layer(self.source, done)

    def collect(self) -> dict[str, Any]:
        """The report of all parts."""
        layers, units = [], []
        for layer, found in self.units.items():
            rows = json.loads(self._part(layer).read_text())
            layers += [{"layer": layer, **_figures(row)} for row in rows if row["unit"] is None]
            for unit in found:
                own = [row for row in rows if row["unit"] == unit.place]
                units.append(
                    {
                        "layer": layer,
                        "unit": unit.place,
                        "role": unit.linears[0].role,
                        "patterns": unit.patterns,
                        "weights": unit.weights,
                        "bytes": unit.weights * self.dtype.itemsize,
                        "vector_bytes": self._count_vectors(unit),
                        "candidates": {row["candidate"]: _figures(row) for row in own},
                    }
                )
        c, e = self.settings.calibration, self.effort
        return {
            "method": self.candidates[0].name,
            "samples": e.samples,
            "length": e.length,
            "draws": e.draws,
            "seed": c.seed,
            "bytes": sum(info.nbytes for info in self.source.tensors.values()),
            "layers": layers,
            "units": units,
        }

    def _count_vectors(self, unit: Unit) -> int:
        """Bytes of the vectors that a scale is kept in which no tensor before the unit's linears can take up."""
        names = {linear.name: linear.shape[1] for linear in unit.linears}
        return self.dtype.itemsize * sum(
            names[name]
            for group in self._groups(unit.layer)
            if group.fold is None
            for name in group.linears
            if name in names
        )

    def _groups(self, layer: int) -> list[ScaleGroup]:
        names = {linear.name for unit in self.units[layer] for linear in unit.linears}
        prefix = f"transformer.layers.{layer}."
        present = {name.removesuffix(".weight") for name in self.source.tensors if name.startswith(prefix)}
        return scale_groups(self.source.architecture, layer, present, names)

    def _list_variants(self, layer: int) -> list[tuple[Unit | None, Candidate, Mapping[str, Linear]]]:
        """Each unit by itself under each candidate that makes a difference; the whole layer under the first."""
        variants: list[tuple[Unit | None, Candidate, Mapping[str, Linear]]] = []
        whole: dict[str, Linear] = {}
        for unit in self.units[layer]:
            seen = []
            for i, candidate in enumerate(self.candidates):
                linears = unit.treat(candidate)
                if linears is None or (unit.linears[0].expert is not None and _rounds_inputs(candidate)):
                    continue
                whole |= linears if i == 0 else {}
                if linears not in seen:  # a group of 128 that does not divide is one of 64
                    seen.append(linears)
                    variants.append((unit, candidate, linears))
        return [*variants, *([(None, self.candidates[0], whole)] if whole else [])]

    def _capture(self, layer: int) -> Captured | None:
        methods = {candidate.method for candidate in self.candidates}
        if not any(METHODS[method].measures for method in methods):
            return None
        names = sorted({group.seen_at for group in self._groups(layer)})
        return self.propagation.capture(layer, names, names if any(METHODS[m].moments for m in methods) else ())

    def _lay_over(self, layer: int, linears: Mapping[str, Linear], captured: Captured | None) -> Overlay:
        return lay_over(
            self.source,
            layer,
            linears,
            captured,
            dtype=self.dtype,
            clip=self.settings.clip,
            unrouted=self.settings.unrouted_experts,
        )

    def _compare(self, layer: int, overlay: Overlay, above: Sequence[HiddenStates]) -> dict[str, float]:
        """The layer's relative output error (against what it adds to the residual stream), and the KL it makes."""
        before, after = self.propagation.states(layer), self.propagation.states(layer + 1)
        runner = self.propagation.load(layer, overlay)
        error = norm = 0.0
        divergences = []
        batches = zip(
            runner.outputs(before), before.batches(), after.batches(), *(g.batches() for g in above), strict=True
        )
        for output, hidden, original, *gradients in batches:
            moved = output - original
            error += float(moved.square().sum(dtype=torch.float64))
            norm += float((original - hidden).square().sum(dtype=torch.float64))
            squares = [(gradient * moved).sum(-1).square().mean(-1) for gradient in gradients]
            divergences.append(torch.stack(squares).mean(0) / 2)
        return {"kl": _round(_average(torch.cat(divergences))), "error": _round((error / max(norm, 1e-30)) ** 0.5)}

    def _part(self, layer: int) -> Path:
        return self.workspace.path / FOLDER / f"layer-{layer:05}.json"


def _average(divergences: Tensor) -> float:
    """Over samples, none of which counts for more than OUTLIER times the median: where a state is about to tip over (a
    second attention sink, another expert) gradients explode, and the second order says far more than can happen."""
    return float(divergences.clamp(max=OUTLIER * float(divergences.median())).mean(dtype=torch.float64))


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("kl", "error", "bytes")}


def _rounds_inputs(candidate: Candidate) -> bool:
    return FORMATS[METHODS[candidate.method].format].static_inputs


def _round(value: float) -> float:
    """Four digits: the last bits of a sum depend on the number of threads, and equal runs are to give equal bytes."""
    return float(f"{value:.4g}")
