"""recipe: auto: solved from measured sensitivity, both left beside the checkpoint that comes of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pipeline.progress import SILENT, Progress
from pipeline.quantization.options import Goal
from pipeline.quantization.recipe import RECIPE, Recipe, solve
from pipeline.quantization.sensitivity import REPORT
from pipeline.quantization.sensitivity_file import read_sensitivity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.quantization.settings import QuantizeSettings
    from pipeline.workspace import Workspace


def solve_in(
    source: CheckpointFolder,
    workspace: Workspace,
    *,
    settings: QuantizeSettings,
    goal: Goal,
    formats: Sequence[str],
    file: Path,
    progress: Progress = SILENT,
) -> Recipe:
    """Solves from `file`, a sensitivity.json, and leaves it and recipe.yaml in the workspace."""
    found = read_sensitivity(file, source.architecture, settings.rules)
    recipe = solve(found, settings.method, goal, formats=formats)
    if not workspace.is_done("recipe"):
        report, written = workspace.path / REPORT, workspace.path / RECIPE
        report.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        written.write_text(recipe.render(), encoding="utf-8")
        workspace.finish("recipe", [report, written])
    progress.note(
        f"recipe for {goal.kind} {goal.limit:g}: KL {recipe.kl:.3g} nats a token predicted, size ratio "
        f"{recipe.size_ratio:.3f}; " + ", ".join(f"{name} {count}x" for name, count in sorted(recipe.counts.items()))
    )
    return recipe
