"""How the logits feel a change of a layer's output: gradients for the Fisher estimate of KL divergence.

To second order the KL divergence between the model's next-token distribution p and the one after the hidden states h
were moved by d is 1/2 dᵀFd, with the Fisher information F = E_y~p[g gᵀ], g = d log p(y)/dh. It is an expectation over
tokens drawn from the model's own distribution (not the text's: Kunstner et al., arXiv 1905.12558), and (g·d)²/2 is an
unbiased sample of it. One backward pass serves every layer and every way of quantizing it: BRECQ (Li et al., arXiv
2102.05426, §3.2) weighs reconstruction errors by the same diagonal blocks.

Layers are taken from the last to the first, each loaded alone; states and gradients are files.

Shapes: B samples, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from pipeline.progress import SILENT, Progress
from pipeline.quantization.hidden_states import HiddenStates

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeline.checkpoint.folder import CheckpointFolder

HEAD_ELEMENTS = 1 << 25  # logits held at a time: 128 MB


class Head:
    """The final norm and the projection to logits."""

    def __init__(self, source: CheckpointFolder) -> None:
        from pipeline.checkpoint.hub_weights import hf_outer_state
        from pipeline.checkpoint.reference import build_hf_norm

        state = hf_outer_state(source, source.architecture)
        self.norm = build_hf_norm(source.config, state["model.norm.weight"].float())
        self.weight = state.get("lm_head.weight", state["model.embed_tokens.weight"]).float()  # tied where it is absent

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., V]."""
        return torch.nn.functional.linear(self.norm(hidden), self.weight)

    def gradient(self, hidden: Tensor, chance: torch.Generator) -> Tensor:
        """d log p(y)/dh [B, T, H] for a token y drawn at each position."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        step = max(1, HEAD_ELEMENTS // self.weight.shape[0])
        parts = []
        for rows in torch.split(flat, step):
            with torch.enable_grad():
                leaf = rows.detach().requires_grad_(True)
                log_p = torch.log_softmax(self.logits(leaf), -1)
                drawn = torch.multinomial(log_p.detach().exp(), 1, generator=chance)
                parts.append(torch.autograd.grad(log_p.gather(-1, drawn).sum(), leaf)[0])
        return torch.cat(parts).view_as(hidden)


def write_head_gradients(
    head: Head, states: HiddenStates, targets: Sequence[HiddenStates], *, seed: int, progress: Progress = SILENT
) -> None:
    """Of the last layer's output `states`, one file of `targets` per draw. Advances `progress` by a pass for every
    sample and draw."""
    for draw, target in enumerate(targets):
        chance = torch.Generator().manual_seed(seed * 1009 + draw)
        with target.writer() as write:
            for hidden in states.batches():
                write(head.gradient(hidden, chance))
                progress.advance(len(hidden))


def write_layer_gradients(
    layer: LayerRunner,
    states: HiddenStates,
    above: Sequence[HiddenStates],
    below: Sequence[HiddenStates],
    *,
    progress: Progress = SILENT,
) -> None:
    """Gradients of a layer's input from those of its output, draw by draw; the layer's input is in `states`. Advances
    `progress` by a pass for every sample and draw."""
    with ExitStack() as stack:
        writers = [stack.enter_context(target.writer()) for target in below]
        for hidden, *gradients in zip(states.batches(), *(source.batches() for source in above), strict=True):
            with torch.enable_grad():
                leaf = hidden.detach().requires_grad_(True)
                output = layer.run(leaf)
            for i, (gradient, write) in enumerate(zip(gradients, writers, strict=True)):
                write(torch.autograd.grad(output, leaf, gradient, retain_graph=i + 1 < len(writers))[0])
                progress.advance(len(hidden))


class LayerRunner:
    """A transformers decoder layer over whole samples from position 0."""

    def __init__(self, module: nn.Module, rotary: nn.Module, mask: Tensor) -> None:
        self.module, self.rotary, self.mask = module, rotary, mask

    def run(self, hidden: Tensor) -> Tensor:
        """float32 [B, T, H]."""
        positions = torch.arange(hidden.shape[1])[None].expand(hidden.shape[0], -1)
        embeddings = self.rotary(hidden.detach(), positions)
        output: Tensor = self.module(hidden, attention_mask=self.mask, position_embeddings=embeddings)
        return output

    def outputs(self, states: HiddenStates) -> Iterator[Tensor]:
        """Without a graph, batch by batch."""
        for hidden in states.batches():
            with torch.no_grad():  # not around the loop: it would hold for whoever takes the batches, too
                output = self.run(hidden)
            yield output
