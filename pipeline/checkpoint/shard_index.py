"""Which files of a checkpoint's folder hold its tensors: one file, or the shards that an index names. Its names are
somebody else's, and are checked as such."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.checkpoint.strict_json import parse_strict, read_json, read_text
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from pipeline.checkpoint.safetensors_file import SafetensorsFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PICKLE_HINT = (
    "a pickle can run any code on loading: take the repository's safetensors revision, or convert it in a sandbox with "
    "transformers' save_pretrained"
)
FORM = f"a checkpoint is a folder with {CONFIG} and {SINGLE}, or {INDEX} and its shards"
MAX_NAME = 255  # bytes of a file's name, on every file system in use


def find_shards(path: Path) -> dict[str, str] | None:
    """The index: tensor -> the name of its shard, all of them files that are there. None for one file without index."""
    has_index, has_single = (path / INDEX).exists(), (path / SINGLE).exists()
    if has_index:
        places = _read_index(path / INDEX)
        shards = set(places.values())
        if has_single and SINGLE not in shards:
            problem = f"has both {SINGLE} and {INDEX}, which does not name it"
            _fail(path, problem, "delete the one that is not the model")
        _check_present(path, shards, places)
        return places
    if has_single:
        return None
    _explain_absence(path)


def _read_index(path: Path) -> dict[str, str]:
    places = _read_places(path)
    if not isinstance(places, dict) or not places:
        _fail(path, "has no weight_map, or an empty one")
    accepted: set[Any] = set()
    for tensor, name in places.items():
        # Every shard's name once: an index repeats it for each of up to 90,000 tensors.
        if name.__class__ is str and name in accepted:
            continue
        if not isinstance(name, str) or not _is_plain(name):
            _fail(path, f"places {_spell(tensor)} in {_spell(name)}, which is not the name of a file in the folder")
        if name.endswith(PICKLES):
            _fail(path, f"places {_spell(tensor)} in {name}, a pickle", PICKLE_HINT)
        accepted.add(name)
    return places


def _read_places(path: Path) -> Any:
    """The index's `weight_map`, quickly where it is as every writer makes it: 90,000 pairs are a tenth of a second."""
    text = read_text(path)
    if b"\\" not in text:
        with suppress(ValueError):
            document = parse_strict(text, unique=False)
            # Without escapes every string has two quotes; a key that was given twice has lost one.
            if isinstance(document, dict) and text.count(b'"') == 2 * _count_strings(document):
                return document.get("weight_map")
    return read_json(path).get("weight_map")


def _count_strings(value: Any) -> int:
    if isinstance(value, dict):
        nested = [child for child in value.values() if child.__class__ is not str]
        return 2 * len(value) - len(nested) + sum(map(_count_strings, nested))
    if isinstance(value, list):
        return sum(map(_count_strings, value))
    return int(isinstance(value, str))


def _is_plain(name: str) -> bool:
    """A file's own name, no path: an index must not lead out of its folder."""
    if not name.isprintable() or len(name.encode()) > MAX_NAME:
        return False
    return name not in ("", ".", "..") and PurePath(name).name == name and "\\" not in name


def _check_present(path: Path, shards: set[str], places: Mapping[str, str]) -> None:
    # A link counts where its target does: the hub's own cache is made of links.
    missing = sorted(name for name in shards if not (path / name).is_file())
    if missing:
        name = missing[0]
        tensors = [tensor for tensor, place in places.items() if place == name]
        example = _spell(min(tensors))
        more = f" (and {len(missing) - 1} more of {len(shards)} shards)" if len(missing) > 1 else ""
        is_there = (path / name).is_symlink() or (path / name).exists()
        what = "is a broken link or no regular file" if is_there else "is missing"
        raise CheckpointError(
            f"{path / name} {what}; it holds {len(tensors)} of the model's tensors, {example} among them{more}",
            hint="finish the download or copy",
        )


def check_index(files: list[SafetensorsFile], places: Mapping[str, str]) -> None:
    found: dict[str, str] = {}
    for file in files:
        found.update(dict.fromkeys(file.tensors, file.path.name))
    if found == places and sum(len(file.tensors) for file in files) == len(found):
        return
    hint = "the shards and the index are of two models"
    for file in files:
        indexed = {tensor for tensor, name in places.items() if name == file.path.name}
        for tensor in sorted(indexed - file.tensors.keys()):
            _fail(file.path, f"does not hold {_spell(tensor)}, which {INDEX} places there", hint)
        for tensor in sorted(file.tensors.keys() - indexed):
            _fail(file.path, f"holds {_spell(tensor)}, which {INDEX} does not place there", hint)


def _explain_absence(path: Path) -> NoReturn:
    names = sorted(entry.name for entry in path.iterdir())
    if SINGLE in names:
        _fail(path / SINGLE, "is a broken link", "finish the download or copy")
    pickles = [name for name in names if name.endswith(PICKLES)]
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        _fail(path, f"has {shards[0]}, but neither {INDEX} nor {SINGLE}", "copy the index from the model's repository")
    if pickles:
        _fail(path, f"holds pickles only ({pickles[0]}), which are not read", PICKLE_HINT)
    _fail(path, "holds no safetensors files", FORM)


def _fail(path: Path, problem: str, hint: str = "copy the file again from the model") -> NoReturn:
    raise CheckpointError(f"{path} {problem}", hint=hint)


def _spell(value: Any) -> str:
    """A name from a hostile file, for a message."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 200 else text[:197] + "..."
