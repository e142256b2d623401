"""recipe: auto: solved from measured sensitivity, both left beside the checkpoint that comes of it."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
from pipeline.progress import SILENT, Progress
from pipeline.quantization.catalog import GROUP_SIZES, METHODS
from pipeline.quantization.options import Candidate, Goal
from pipeline.quantization.recipe import RECIPE, Recipe, solve
from pipeline.quantization.sensitivity import REPORT
from pipeline.quantization.units import list_units

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.quantization.settings import QuantizeSettings
    from pipeline.workspace import Workspace

_SETTING = "stages.quantize.sensitivity.file names what `trtseek sensitivity` made; without it, it is measured"


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
    found = read_sensitivity(file, source, settings)
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


def read_sensitivity(file: Path, source: CheckpointFolder, settings: QuantizeSettings) -> dict[str, Any]:
    """A sensitivity.json that is of this checkpoint's linears. Raises ConfigError for anything else."""
    found = load_sensitivity(file)
    measured = {(unit["layer"], unit["unit"]): unit["weights"] for unit in found["units"]}
    wanted = {(u.layer, u.place): u.weights for u in list_units(source.architecture, source.tensors, settings.rules)}
    if measured != wanted:
        odd = next(iter(sorted(wanted.items() ^ measured.items())))[0]
        raise ConfigError(
            f"{file} was measured on another model, or with other roles: they differ in layer {odd[0]}, {odd[1]}",
            hint="measure again: `trtseek sensitivity`",
        )
    return found


def load_sensitivity(file: Path) -> dict[str, Any]:
    """A sensitivity.json, of whatever model. Raises ConfigError where it is none, or damaged."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        whole = [found["bytes"]]
        for unit in found["units"]:
            whole += [unit["layer"], unit["weights"], unit["bytes"], unit["vector_bytes"]]
            texts = [unit["unit"], *unit["patterns"]]
            figures = [each[key] for each in unit["candidates"].values() for key in ("kl", "bytes")]
            for candidate in map(Candidate.parse, unit["candidates"]):
                if candidate.method not in METHODS:
                    raise ValueError(f"{candidate.method} is no method of this version")
                if candidate.group_size not in (None, *GROUP_SIZES):
                    raise ValueError(f"{candidate.name} is no group size of this version")
            if not (
                unit["weights"] > 0 and all(isinstance(text, str) for text in texts) and all(map(_is_number, figures))
            ):
                raise ValueError(f"layer {unit['layer']}, {unit['unit']} holds no figures")
        if not all(isinstance(number, int) for number in whole):
            raise ValueError("sizes are no whole numbers")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", hint=_SETTING) from error
    except KeyError as error:
        raise ConfigError(f"{file} is no sensitivity.json: it lacks {error}", hint=_SETTING) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is no sensitivity.json: {error}", hint=_SETTING) from error
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
