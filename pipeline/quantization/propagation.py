"""The states before all layers, and the gradients of what layers put out: in files, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.progress import SILENT, Progress
from pipeline.quantization.calibration import Calibration, sample_pieces
from pipeline.quantization.gradients import Head, LayerRunner, write_head_gradients, write_layer_gradients
from pipeline.quantization.hidden_states import HiddenStates

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.tensors import TensorSource
    from pipeline.quantization.calibration_files import CalibrationFile
    from pipeline.quantization.options import Effort
    from pipeline.workspace import Workspace

FOLDER = "sensitivity"


class Propagation:
    """Runs the layers of an engine checkpoint, in float32, over text that `seed` draws from `files`."""

    def __init__(
        self,
        source: CheckpointFolder,
        workspace: Workspace,
        *,
        files: Sequence[CalibrationFile | Path],
        effort: Effort,
        seed: int,
        progress: Progress = SILENT,
    ) -> None:
        self.source, self.workspace, self.progress = source, workspace, progress
        self.files, self.effort, self.seed = files, effort, seed
        self.folder = workspace.path / FOLDER
        self.folder.mkdir(exist_ok=True)
        self.calibration = Calibration(
            source,
            workspace,
            self._sample,
            samples=effort.samples,
            length=effort.length,
            seed=seed,
            progress=progress,
        )
        self.states, self.capture = self.calibration.states, self.calibration.capture
        files_at_once = source.architecture.num_layers + 1 + 2 * effort.draws
        workspace.require(files_at_once * self.states(0).nbytes)

    def gradients_above(self, layer: int) -> list[HiddenStates]:
        """The gradients of the output of `layer`, made from the nearest ones above that are there."""
        last = self.source.architecture.num_layers - 1
        files = self._gradients(layer + 1)
        if self.workspace.is_done(f"gradients-{layer + 1}") and all(file.path.exists() for file in files):
            return files
        self.require_states(layer + 1)
        if layer == last:
            states = self.states(last + 1)
            self.progress.start("gradients of the logits", self.effort.samples * len(files), "passes")
            write_head_gradients(Head(self.source), states, files, seed=self.seed, progress=self.progress)
        else:
            above = self.gradients_above(layer + 1)
            runner, passes = self.load(layer + 1, self.source), self.effort.samples * len(files)
            self.progress.start(f"gradients of layer {layer + 1}", passes, "passes")
            write_layer_gradients(runner, self.states(layer + 1), above, files, progress=self.progress)
        self.workspace.finish(f"gradients-{layer + 1}", [file.path for file in files])
        return files

    def require_states(self, layer: int) -> None:
        """The states before `layer` are there; those after the last layer, which calibration does not keep, too."""
        last = self.source.architecture.num_layers
        states = self.states(layer)
        if states.path.exists() and self.workspace.is_done(f"states-{layer}"):
            return
        self.calibration.capture(min(layer, last - 1), ())
        if layer == last:
            states.write(self.load(last - 1, self.source).outputs(self.states(last - 1)))
            self.workspace.finish(f"states-{last}", [states.path])

    def load(self, layer: int, source: TensorSource) -> LayerRunner:
        from pipeline.checkpoint.hub_weights import hf_layer_state
        from pipeline.checkpoint.reference import build_hf_layer, causal_mask

        state = hf_layer_state(source, self.source.architecture, layer)
        module = build_hf_layer(self.source.config, layer, state, torch.float32)
        return LayerRunner(module, self._rotary, causal_mask(self.effort.length, torch.float32))

    @cached_property
    def _rotary(self) -> torch.nn.Module:
        from pipeline.checkpoint.reference import build_hf_rotary

        return build_hf_rotary(self.source.config)

    def _gradients(self, layer: int) -> list[HiddenStates]:
        """Files for the gradients of the states before `layer`."""
        hidden = self.source.architecture.hidden_size
        return [
            HiddenStates(self.folder / f"gradients-{layer:05}-{i}.f32", self.effort.samples, self.effort.length, hidden)
            for i in range(self.effort.draws)
        ]

    def _sample(self) -> Tensor:
        e = self.effort
        return sample_pieces(
            self.source, self.files, samples=e.samples, length=e.length, seed=self.seed, progress=self.progress
        )
