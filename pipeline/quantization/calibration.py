"""Calibration: text goes through the transformers model, one decoder layer in memory at a time, kept states on disk.

The states that a layer sees are those of the original model, not of the already quantized layers before it, as in
AWQ's own code: layers do not depend on each other, and a killed run goes on at the layer where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.checkpoint.tensors import release_layer
from pipeline.errors import QuantizationError
from pipeline.progress import SILENT, Progress
from pipeline.quantization.capture import Capture, Captured, draw_priorities
from pipeline.quantization.hidden_states import HiddenStates
from pipeline.quantization.text import sample_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.quantization.calibration_files import CalibrationFile
    from pipeline.workspace import Workspace

FOLDER = "calibration"
EXPERT_INPUTS = "expert-inputs.f32"  # of the layer at hand
EMBEDDING = "transformer.vocab_embedding.weight"


class Calibration:
    """Runs the layers of an engine checkpoint over `tokens` (int64 [samples, length]), in float32."""

    def __init__(
        self,
        source: CheckpointFolder,
        workspace: Workspace,
        tokens: Callable[[], Tensor],
        *,
        samples: int,
        length: int,
        seed: int,
        progress: Progress = SILENT,
    ) -> None:
        self.source, self.workspace, self.tokens, self.progress = source, workspace, tokens, progress
        self.samples, self.length, self.seed = samples, length, seed
        self.folder = workspace.path / FOLDER
        self._drawn: Tensor | None = None

    def draw(self) -> None:
        """Has the text ready for the first layer where no earlier run left states; raises what `tokens` does."""
        layers = range(self.source.architecture.num_layers)
        if not any(self.workspace.is_done(f"states-{layer}") for layer in layers):
            self._drawn = self.tokens()

    def states(self, layer: int) -> HiddenStates:
        path = self.folder / f"states-{layer:05}.f32"
        return HiddenStates(path, self.samples, self.length, self.source.architecture.hidden_size)

    def capture(self, layer: int, names: Iterable[str], moments: Collection[str] = ()) -> Captured:
        """Runs `layer` over all samples, keeps what it hands on, and returns the inputs of the modules `names`, with
        the second moments of those among `moments`.

        Starts at the latest layer whose states an earlier run left. Raises QuantizationError, naming the layer, where
        activations are not finite.
        """
        for earlier in range(self._latest(layer), layer):
            self._run(earlier, None)
        experts = self.source.architecture.experts
        routed = experts.num_routed if experts is not None and self.source.architecture.is_routed(layer) else 0
        priorities = draw_priorities(self.samples * self.length, self.seed)
        capture = Capture(names, priorities, routed, moments, self.folder / EXPERT_INPUTS, self.length)
        self._run(layer, capture)
        return capture.finish()

    def forget(self, layer: int) -> None:
        """Deletes the states before `layer` and before those before it: it is quantized, and its own output is kept."""
        for done in range(layer + 1):
            self.states(done).path.unlink(missing_ok=True)
        (self.folder / EXPERT_INPUTS).unlink(missing_ok=True)

    def _latest(self, layer: int) -> int:
        """The last layer up to `layer` whose input is on disk; makes the first layer's where none is."""
        for candidate in range(layer, -1, -1):
            if self.workspace.is_done(f"states-{candidate}") and self.states(candidate).path.exists():
                return candidate
        self.folder.mkdir(exist_ok=True)
        states = self.states(0)
        embedding = self.source.read(EMBEDDING).to_torch()
        tokens = self._drawn if self._drawn is not None else self.tokens()
        states.write(embedding[tokens[start:stop]].float() for start, stop in states.spans())
        self._drawn = None
        self.source.release(EMBEDDING)
        self.workspace.finish("states-0", [states.path])
        return 0

    def _run(self, layer: int, capture: Capture | None) -> None:
        following = self.states(layer + 1)
        known = self.workspace.is_done(f"states-{layer + 1}") and following.path.exists()
        last = layer + 1 == self.source.architecture.num_layers
        outputs = self._outputs(layer, capture)
        if known or last:
            for _ in outputs:  # only looked at
                pass
            return
        following.write(outputs)
        self.workspace.finish(f"states-{layer + 1}", [following.path])

    def _outputs(self, layer: int, capture: Capture | None) -> Iterator[Tensor]:
        from contextlib import nullcontext

        from pipeline.checkpoint.hub_weights import hf_layer_state
        from pipeline.checkpoint.reference import build_hf_layer, build_hf_rotary, causal_mask

        states = self.states(layer)
        state = hf_layer_state(self.source, self.source.architecture, layer)
        module = build_hf_layer(self.source.config, layer, state, torch.float32)
        del state
        release_layer(self.source, layer)  # of what is no float32 the module has copies
        rotary = build_hf_rotary(self.source.config)
        mask = causal_mask(self.length, torch.float32)
        positions = torch.arange(self.length)[None]
        self.progress.start(f"calibrating layer {layer}", self.samples, "samples")
        with capture.watching(module) if capture else nullcontext():
            for (start, stop), hidden in zip(states.spans(), states.batches(), strict=True):
                if capture:
                    capture.start_batch(start * self.length)
                embeddings = rotary(hidden, positions.expand(stop - start, -1))
                cache = capture.cache if capture else None
                output = module(hidden, attention_mask=mask, position_embeddings=embeddings, cache=cache)
                if not torch.isfinite(output).all():
                    raise QuantizationError(
                        f"layer {layer}: activations are NaN or infinite in samples {start} to {stop - 1}",
                        hint="the checkpoint's weights are damaged, or were converted to a type that they overflow",
                    )
                yield output
                self.progress.advance(stop - start)


def sample_pieces(
    source: CheckpointFolder,
    files: Sequence[CalibrationFile | Path],
    *,
    samples: int,
    length: int,
    seed: int,
    progress: Progress = SILENT,
) -> Tensor:
    """int64 [samples, length] by the checkpoint's own tokenizer, each piece begun as the model's inputs are."""
    bos = source.config.get("bos_token_id")
    return sample_tokens(
        tokenizer_file(source),
        files,
        samples=samples,
        length=length,
        seed=seed,
        vocab_size=source.architecture.vocab_size,
        bos=bos if isinstance(bos, int) else None,
        progress=progress,
    )


def tokenizer_file(source: CheckpointFolder) -> Path:
    """The checkpoint's tokenizer.json. Raises QuantizationError where there is none."""
    for file in source.tokenizer_files:
        if file.name == "tokenizer.json":
            return file
    raise QuantizationError(
        f"{source.path} has no tokenizer.json; calibration text cannot be tokenized",
        hint="put the model's tokenizer.json beside config.json, or use method: rtn, which needs no text",
    )
