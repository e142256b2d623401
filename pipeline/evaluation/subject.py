"""What is measured: checkpoints of one model in any of the forms that are read, under the same tensor names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import CompatibilityError, ConfigError
from pipeline.evaluation.hub_view import HubView
from pipeline.network.spec import CACHE_PLUGINS, Lowering, NetworkSpec

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import TensorSource

# A run's folder stands for what these stages made, in this order.
CHECKPOINT_STAGES = ("convert", "quantize")
RUN = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One checkpoint. `source` has engine names; `dtype` is its network's type; `folder` has config and tokenizer;
    `kv_cache`: what its cache is quantized to, by its own config, or "model"."""

    label: str
    source: TensorSource
    architecture: Architecture
    dtype: str
    folder: CheckpointFolder
    kv_cache: str = "model"

    def network(self, max_seq_len: int, block_size: int) -> NetworkSpec:
        """What is run to measure it. A quantized cache is in the plugins only."""
        lowering = Lowering() if self.kv_cache == "model" else Lowering(**dict.fromkeys(CACHE_PLUGINS, "plugin"))
        return NetworkSpec(
            dtype=self.dtype,
            max_seq_len=max_seq_len,
            block_size=block_size,
            kv_cache=self.kv_cache,
            lowering=lowering,
        )

    @property
    def nbytes(self) -> int:
        """Of the weights as they are stored."""
        return sum(info.nbytes for info in self.folder.tensors.values())

    @property
    def begin(self) -> list[int]:
        """The token that the model's real inputs begin with, as calibration has it."""
        bos = self.folder.config.get("bos_token_id")
        return [bos] if isinstance(bos, int) else []

    @property
    def tokenizer(self) -> Path:
        return self.folder.path / "tokenizer.json"


def open_subject(path: Path, label: str | None = None) -> Subject:
    """An engine checkpoint as it is, a Hugging Face folder through the layouts. Raises CheckpointError."""
    return describe_subject(CheckpointFolder.open(path), label or str(path))


def describe_subject(folder: CheckpointFolder, label: str) -> Subject:
    if folder.own is not None:
        source: TensorSource = folder
        dtype = folder.architecture.dtype
    else:
        source = view = HubView(folder)
        dtype = view.dtype
    return Subject(
        label=label,
        source=source,
        architecture=folder.architecture,
        dtype=dtype,
        folder=folder,
        kv_cache=folder.own.kv_cache if folder.own is not None else "model",
    )


def open_subjects(paths: Sequence[Path]) -> list[Subject]:
    """The checkpoints to compare, the first of them the one to compare with. A run's folder gives what its stages made.

    Raises ConfigError where there are fewer than two, CompatibilityError where they are not of one model.
    """
    expanded = [each for path in paths for each in _expand(path)]
    if len(expanded) < 2:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: {'one checkpoint' if expanded else 'no checkpoint'} is nothing to compare",
            hint="name two or more checkpoints, the original first, or a run's folder (out/<name>)",
        )
    subjects = [open_subject(path) for path in expanded]
    check_alike(subjects)
    return subjects


def check_alike(subjects: Sequence[Subject]) -> None:
    """Raises CompatibilityError, naming what differs, for checkpoints whose outputs cannot be held side by side."""
    first = subjects[0]
    for subject in subjects[1:]:
        for name in ("num_layers", "hidden_size", "vocab_size"):
            ours, theirs = getattr(first.architecture, name), getattr(subject.architecture, name)
            if ours != theirs:
                raise CompatibilityError(
                    f"{subject.label} is of another model than {first.label}: {name} {theirs}, not {ours}",
                    hint="compare checkpoints of one model: its original, conversions and quantizations",
                )


def _expand(path: Path) -> list[Path]:
    if not (path / RUN).is_file():
        return [path]
    return [path / stage for stage in CHECKPOINT_STAGES if (path / stage).is_dir()]
