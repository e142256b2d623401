"""A folder of safetensors shards with a config.json: a Hugging Face checkpoint, or one of our own.

Opening reads headers only, and checks them against each other. Nothing in the folder is ever executed: `auto_map` is
ignored, pickles are refused.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, NoReturn

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.checkpoint.safetensors_file import SafetensorsFile
from pipeline.checkpoint.strict_json import parse_strict
from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from pipeline.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
# Everything the tokenizers and transformers libraries may look for.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PICKLE_HINT = (
    "a pickle can run any code on loading: take the repository's safetensors revision, or convert it in a sandbox with "
    "transformers' save_pretrained"
)
_FORM = f"a checkpoint is a folder with {CONFIG} and {SINGLE}, or {INDEX} and its shards"
MAX_NAME = 255  # bytes of a file's name, on every file system in use
MAX_JSON = 20 << 20  # bytes; DeepSeek-V3's index takes 9 MB


class CheckpointFolder:
    """A TensorSource over all shards of a folder. `tensors` goes shard by shard, each in its header's order."""

    def __init__(self, path: Path, config: dict[str, Any], files: list[SafetensorsFile]) -> None:
        self.path = path
        self.config = config
        self.architecture: Architecture = parse_architecture(config, str(path / CONFIG))
        self._shards = files
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            tensors |= file.tensors
        self.tensors: Mapping[str, TensorInfo] = tensors

    @classmethod
    def open(cls, path: Path) -> CheckpointFolder:
        """Raises CheckpointError, naming the file, for whatever is missing, damaged, contradictory or a pickle."""
        if not path.is_dir():
            what = "is no folder" if path.exists() else "there is no such folder"
            raise CheckpointError(f"{path}: {what}", hint=_FORM)
        with _without_collection():
            places = _find_shards(path)
            config = read_json(path / CONFIG)
            names = [SINGLE] if places is None else sorted(set(places.values()))
            files = [SafetensorsFile(path / name) for name in names]
            if places is not None:
                _check_index(files, places)
            return cls(path, config, files)

    @property
    def files(self) -> list[Path]:
        """Every file the checkpoint consists of: config, index, shards, generation config, tokenizer."""
        others = [self.path / name for name in (CONFIG, INDEX, GENERATION_CONFIG)]
        return [f for f in others if f.is_file()] + self.shards + self.tokenizer_files

    @property
    def shards(self) -> list[Path]:
        return [shard.path for shard in self._shards]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(shard.nbytes for shard in self._shards)

    @property
    def tokenizer_files(self) -> list[Path]:
        return [self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()]

    def copy_companions(self, folder: Path) -> list[Path]:
        """Copies what goes with any form of the weights, generation config and tokenizer; returns the copies."""
        companions = [path for path in (self.path / GENERATION_CONFIG, *self.tokenizer_files) if path.is_file()]
        return [Path(shutil.copyfile(path, folder / path.name)) for path in companions]

    def read(self, name: str) -> RawTensor:
        """A view of the mapped file. Raises CheckpointError for a name that no shard has."""
        return self._owner(name).read(name)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Lets go of the resident pages of a tensor's bytes [begin, end), so that reading on does not add up."""
        self._owner(name).release(name, begin, end)

    def file_of(self, name: str) -> Path:
        """The shard that holds a tensor."""
        return self._owner(name).path

    @cached_property
    def _owners(self) -> dict[str, SafetensorsFile]:
        return {name: file for file in self._shards for name in file.tensors}

    def _owner(self, name: str) -> SafetensorsFile:
        if name not in self._owners:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")
        return self._owners[name]


def _read_text(path: Path) -> bytes:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", hint="copy it from the model's own repository")
    try:
        if path.stat().st_size > MAX_JSON:
            _fail(path, f"has {path.stat().st_size} bytes, too many for what it should be")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", hint="check its permissions") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError with the file's name, and the place in it."""
    try:
        value = parse_strict(_read_text(path))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}", hint="copy it again from the model") from error
    if not isinstance(value, dict):
        _fail(path, "is not a JSON object")
    return value


@contextmanager
def _without_collection() -> Iterator[None]:
    """Headers make a hundred thousand objects and no cycles; the collector would go through them all repeatedly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _find_shards(path: Path) -> dict[str, str] | None:
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
    text = _read_text(path)
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


def _check_index(files: list[SafetensorsFile], places: Mapping[str, str]) -> None:
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
    _fail(path, "holds no safetensors files", _FORM)


def _fail(path: Path, problem: str, hint: str = "copy the file again from the model") -> NoReturn:
    raise CheckpointError(f"{path} {problem}", hint=hint)


def _spell(value: Any) -> str:
    """A name from a hostile file, for a message."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 200 else text[:197] + "..."
