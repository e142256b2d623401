"""The JSON files beside an engine: objects of a stated format, read the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import BuildError


def read_document(path: Path, *, kind: str, version: int, hint: str) -> dict[str, Any]:
    """The object in a file, without its `format`. Raises BuildError, with `hint`, where it is missing, damaged or of
    another format than `version`; `kind` is what it should be."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}", hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{path}: not JSON: {error}", hint=hint) from None
    if not isinstance(values, dict) or values.pop("format", None) != version:
        raise BuildError(f"{path}: not {kind} of format {version}", hint=hint)
    return values
