"""`stages.quantize.recipe` in its short forms: a recipe file, the word auto, rows. All become the section that it is.

What a file holds is laid into the config, so that its content is what counts, and so that a mistake in it is told with
its own line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.document import Located, name_value, read_value
from pipeline.config.nearby import explain_absence, find_near
from pipeline.config.section import EMPTY_PATH
from pipeline.errors import ConfigError

PATH = ("stages", "quantize", "recipe")
KEY = ".".join(PATH)
AUTO = "auto"
_EMPTY: tuple[object, ...] = (None, [], {}, {"rows": []})


def expand_recipe(tree: Located, show: Callable[[Path], str]) -> Located:
    """The composed config with the section in place of a short form. ConfigError for a file that is not there, or holds
    no rows."""
    found: Any = tree
    for part in PATH:
        found = found.value.get(part) if found is not None and isinstance(found.value, dict) else None
    if found is None or isinstance(found.value, dict):
        return tree
    return tree.merge(_nest(_read(found, show), found))


def _read(found: Located, show: Callable[[Path], str]) -> Located:
    if isinstance(found.value, list):
        return _hold_rows(found)
    if found.value == AUTO:
        return Located({"auto": Located(True, found.origin)}, found.origin)
    if not isinstance(found.value, str):
        raise ConfigError(f"{found.origin}: {KEY}: must be a file, auto or a list of rows, not {found.value!r}")
    if not found.value.strip():
        raise ConfigError(f"{found.origin}: {KEY}: is empty", hint=EMPTY_PATH)
    path = Path(found.value)
    if not path.is_file():
        near = find_near(path.name, path.parent, "*.yaml")
        question = f"did you mean {path.with_name(near)}? " if near else ""
        raise ConfigError(
            f"{found.origin}: {KEY}: {path}: {explain_absence(path)}",
            hint=f"{question}It was looked for in {Path.cwd()}; auto solves for a recipe",
        )
    document = read_value(path, show(path))
    if document.plain() in _EMPTY:
        raise ConfigError(f"{document.origin}: holds no rows", hint='a row: - {pattern: "*.mlp.proj", method: int8}')
    if isinstance(document.value, list):
        return _hold_rows(document)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{document.origin}: must hold rows, not {name_value(document.value)}")
    return document


def _hold_rows(rows: Located) -> Located:
    return Located({"rows": rows}, rows.origin)


def _nest(section: Located, found: Located) -> Located:
    for part in reversed(PATH):
        section = Located({part: section}, found.origin)
    return section
