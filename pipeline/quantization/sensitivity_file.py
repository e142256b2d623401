"""sensitivity.json read again: that it is one, and of the model at hand; without torch, for `validate`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.errors import ConfigError
from pipeline.quantization.catalog import GROUP_SIZES, METHODS
from pipeline.quantization.options import Candidate
from pipeline.quantization.units import Unit, list_units

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.quantization.selection import Rules

_SETTING = "stages.quantize.sensitivity.file names what `trtseek sensitivity` made; without it, it is measured"


def read_sensitivity(file: Path, architecture: Architecture, rules: Rules) -> dict[str, Any]:
    """A sensitivity.json that is of this model's linears. Raises ConfigError for anything else."""
    found = load_sensitivity(file)
    measured = {(unit["layer"], unit["unit"]): unit["weights"] for unit in found["units"]}
    wanted = {(unit.layer, unit.place): unit.weights for unit in list_model_units(architecture, rules)}
    if measured != wanted:
        odd = next(iter(sorted(wanted.items() ^ measured.items())))[0]
        raise ConfigError(
            f"{file} was measured on another model, or with other roles: they differ in layer {odd[0]}, {odd[1]}",
            hint="measure again: `trtseek sensitivity`",
        )
    return found


def list_model_units(architecture: Architecture, rules: Rules) -> list[Unit]:
    """`list_units` of what `convert` makes of the model, before it has."""
    targets = {m.target: TensorInfo(m.target, "", m.target_shape) for m in layout_for(architecture).mappings()}
    return list_units(architecture, targets, rules)


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
