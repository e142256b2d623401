"""From a file name and `--set` options to a Config: finding, `extends`, overrides, and errors that name the place."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from pipeline.config.document import Located, Origin, parse, read_document
from pipeline.config.explain import explain
from pipeline.config.lowerings import choose_lowerings
from pipeline.config.nearby import ABSENT, explain_absence, find_near
from pipeline.config.recipe_file import expand_recipe
from pipeline.config.schema import Config
from pipeline.config.section import EMPTY_PATH
from pipeline.errors import ConfigError

FOLDER = Path("configs")
# Enough for any honest composition; stops files that extend each other twice per level.
MAX_FILES = 64
# What is wrong with a file that is there to be extended, and nothing else.
UNNAMED = {("missing", ("model",)), ("missing", ("target",))}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads and checks a config file.

    `path` is looked for as given, then in `configs/`. `overrides` are `a.b=value` with the value in YAML, applied after
    all files. Raises ConfigError with file, line, key and the nearest valid key; all problems of a file at once.
    """
    file = find_config(path)
    tree = _Composer().read(file, ())
    for override in overrides:
        tree = tree.merge(_parse_override(override, tree))
    tree = expand_recipe(tree, _show)
    if "name" not in tree.value:
        tree.value["name"] = Located(file.stem, Origin(_show(file), 1))
    try:
        # Through JSON, because pydantic's strict mode takes lists for tuples and strings for paths only there.
        config = choose_lowerings(Config.model_validate_json(json.dumps(tree.plain())))
    except ValidationError as error:
        problems = {(item["type"], item["loc"]) for item in error.errors()}
        if problems == UNNAMED and (others := _list_extending(file)):
            raise ConfigError(
                f"{_show(file)}: names no model and no target: it is there for others to extend",
                hint=f"{', '.join(others)} do; or write one of your own with extends: {file.name}",
            ) from None
        raise explain(error, tree) from None
    config.remember_origins({_join(key): str(origin) for key, origin in tree.walk()})
    return config


def find_config(path: str | Path) -> Path:
    """The file that `path` means: itself, or a file of that name in `configs/`, with or without `.yaml`."""
    path = Path(path)
    names = (path, path.with_name(path.name + ".yaml")) if path.name else (path,)  # no name: "", "/"
    for folder in (Path(), FOLDER):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise ConfigError(_explain_absence(path), hint=_list_configs(path.name))


def _explain_absence(path: Path) -> str:
    if not path.name:
        return "no config is named"
    if (what := explain_absence(path)) != ABSENT:
        return f"{path} {what}"
    return f"{path}: {ABSENT}, here or in {FOLDER}/"


def _list_configs(wanted: str) -> str:
    """The configs there are, one to a line, after the one whose name is nearest."""
    known = sorted(file.name for file in FOLDER.glob("*.yaml") if file.is_file())
    if not known:
        return f"{Path.cwd()} has no {FOLDER}/*.yaml: give the file's path, or go to the folder that holds {FOLDER}/"
    stem = wanted.removesuffix(".yml").removesuffix(".yaml")
    near = difflib.get_close_matches(stem, [name.removesuffix(".yaml") for name in known], n=1)
    question = f"did you mean {near[0]}.yaml? " if near else ""
    return "\n".join([f"{question}{FOLDER}/ holds", *known])


class _Composer:
    """Reads a file and what it extends; files laid over each other in the order in which they are named."""

    def __init__(self) -> None:
        self.files = 0

    def read(self, file: Path, chain: tuple[Path, ...]) -> Located:
        """`chain` is the files that led here, for finding a cycle."""
        shown, resolved = _show(file), file.resolve()
        if resolved in chain:
            names = " extends ".join(_show(link) for link in (*chain[chain.index(resolved) :], resolved))
            raise ConfigError(f"{shown}: extends itself: {names}")
        self.files += 1
        if self.files > MAX_FILES:
            raise ConfigError(f"{shown}: more than {MAX_FILES} files are extended")
        document = read_document(file, shown)
        extends = document.value.pop("extends", None)
        result = Located({}, document.origin)
        for name in _list_names(extends):
            base = file.parent / name.value
            if not base.is_file():
                near = find_near(base.name, base.parent, "*.yaml")
                question = f"did you mean {Path(name.value).with_name(near)}? " if near else ""
                raise ConfigError(
                    f"{name.origin}: extends: {name.value}: {explain_absence(base)}",
                    hint=f"{question}It was looked for in {base.parent.resolve()}: extends: is relative to its file",
                )
            tree = self.read(base, (*chain, resolved))
            tree.value.pop("name", None)  # inherited, two configs would write to one output folder
            result = result.merge(tree)
        return result.merge(document)


def _list_extending(file: Path) -> list[str]:
    """The files beside `file` that extend it."""
    line = re.compile(rf"^extends:.*(?<![\w./-]){re.escape(file.name)}(?![\w./-])", re.MULTILINE)
    others = sorted(other for other in file.parent.glob("*.yaml") if other.name != file.name)
    return [other.name for other in others if line.search(other.read_text(encoding="utf-8", errors="replace"))]


def _list_names(extends: Located | None) -> list[Located]:
    if extends is None:
        return []
    names = extends.value if isinstance(extends.value, list) else [extends]
    for name in names:
        if not isinstance(name.value, str):
            raise ConfigError(f"{name.origin}: extends: must be a file name or a list of them")
        if not name.value.strip():
            raise ConfigError(f"{name.origin}: extends: is empty", hint=EMPTY_PATH)
    return names


def _parse_override(override: str, tree: Located) -> Located:
    """`a.b=value` as a tree that holds only that value; a number in the path picks an item of a list."""
    origin = Origin(f"--set {override}")
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"{origin}: must be KEY=VALUE, e.g. stages.build.max_batch_size=8")
    if path[0] == "extends":
        raise ConfigError(f"{origin}: extends can only be set in a file")
    return _nest(path, parse(text, lambda line: origin), tree, origin)


def _nest(path: list[str], value: Located, under: Located | None, origin: Origin) -> Located:
    if not path:
        return value
    head, *rest = path
    if under is not None and isinstance(under.value, list):
        items = list(under.value)
        if not head.isdigit() or int(head) >= len(items):
            raise ConfigError(f"{origin}: {head} is not one of the list's {len(items)} items, counted from 0")
        items[int(head)] = items[int(head)].merge(_nest(rest, value, items[int(head)], origin))
        return Located(items, origin)
    child = under.value.get(head) if under is not None and isinstance(under.value, dict) else None
    return Located({head: _nest(rest, value, child, origin)}, origin)


def _show(file: Path) -> str:
    """The file's path as the user would type it: relative where it lies below the current folder."""
    resolved = file.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(file)


def _join(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))
