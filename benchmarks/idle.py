"""A network that costs nothing: what is left is what serving itself costs."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROWS = 256
# Runs in the stub after Triton's utilities, which name this project's folder, and before the backend's own code.
_AFTER = "import triton_python_backend_utils as pb_utils\n"
_CODE = "from benchmarks.idle import replace_network\n\nreplace_network({seconds!r})\n"


class IdleRunner:
    """Gives rows of one random matrix, after `seconds` of sleep. Its logits are normal with a standard deviation of 4:
    as peaked as those of a language model that is not very sure."""

    def __init__(self, vocabulary: int, seconds: float = 0.0) -> None:
        self.logits, self.seconds = 4 * torch.randn(ROWS, vocabulary), seconds

    def allocate(self, blocks: int) -> None: ...

    def copy_blocks(self, pairs: Any) -> None: ...

    def zero_blocks(self, blocks: Any) -> None: ...

    def read_blocks(self, blocks: Any) -> Any:
        raise NotImplementedError

    def write_blocks(self, blocks: Any, content: Any) -> None:
        raise NotImplementedError

    def step(self, inputs: Any) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.logits[: len(inputs["logit_rows"])]


def replace_network(seconds: float) -> None:
    """From now on, models that this process loads have the limits of their package, and this network."""
    loading: Any = importlib.import_module("pipeline.triton.backend.loading")
    load = loading.load_model

    def load_idle(*arguments: Any) -> Any:
        loaded = load(*arguments)
        return replace(loaded, runner=IdleRunner(loaded.vocab_size, seconds), kind="idle network")

    loading.load_model = load_idle


def write_backends(backends: Path, folder: Path, seconds: float) -> Path:
    """A package's backends under `folder`, with this network, which sleeps so long in each step."""
    for source in backends.glob("*/model.py"):
        target = folder / source.parent.name / source.name
        target.parent.mkdir(parents=True)
        code = source.read_text(encoding="utf-8")
        assert _AFTER in code
        target.write_text(code.replace(_AFTER, _AFTER + _CODE.format(seconds=seconds), 1), encoding="utf-8")
    return folder
