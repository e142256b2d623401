"""The source checkpoint of a config, checked against it, from headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedSource:
    """`notes`: what a user must know about a combination that works."""

    folder: CheckpointFolder
    notes: tuple[str, ...]


def check_source(config: Config, *, buildable: bool = True) -> CheckedSource:
    """Opens the checkpoint; refuses what cannot be (CheckpointError, CompatibilityError), before any work.

    `buildable` also refuses what is valid but not carried out by this version.
    """
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.compatibility import check_buildable, check_compatibility

    folder = CheckpointFolder.open(config.model.path)
    check = check_buildable if buildable else check_compatibility
    return CheckedSource(folder=folder, notes=check(config, folder.architecture, folder.tensors))
