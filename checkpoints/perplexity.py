"""Held-out perplexity of a checkpoint, and of a unigram model to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Tokens of text per window; each window is read after one BOS, as a prompt is.
WINDOW = 256


@dataclass(frozen=True, kw_only=True)
class Score:
    """Mean negative log-likelihood per token, in nats, over ``tokens`` tokens that spell ``size`` bytes."""

    loss: float
    tokens: int
    size: int

    @property
    def perplexity(self) -> float:
        """Perplexity per token; only comparable under one tokenizer."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte; comparable across tokenizers."""
        return self.loss / math.log(2) * self.tokens / self.size


def cut_windows(tokens: Tensor, window: int = WINDOW) -> Tensor:
    """Cut ``tokens[N]`` into ``[N // window, window]``, dropping the rest."""
    count = len(tokens) // window
    return tokens[: count * window].view(count, window)


def shift_in(windows: Tensor, bos: int) -> Tensor:
    """Return the inputs that predict ``windows[B, T]``: the same, one place later, BOS first."""
    first = torch.full_like(windows[:, :1], bos)
    return torch.cat((first, windows[:, :-1]), dim=1)


@torch.inference_mode()
def measure_loss(model: Callable[..., Any], windows: Tensor, bos: int, batch: int = 8) -> float:
    """Return the mean loss in nats per token of a causal language model on ``windows[B, T]``."""
    total = 0.0
    for part in torch.split(windows, batch):
        logits: Tensor = model(input_ids=shift_in(part, bos), use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), part.flatten(), reduction="sum")
        total += loss.item()
    return total / windows.numel()


def measure_unigram(training: Tensor, windows: Tensor, vocab_size: int) -> float:
    """Return the loss of a unigram model, add-one smoothed, counted on ``training[N]``."""
    counts = torch.bincount(training, minlength=vocab_size).double() + 1
    return float(-(counts / counts.sum()).log()[windows.flatten()].mean())
