"""A folder of safetensors shards with a config.json: a Hugging Face checkpoint, or one of our own.

Opening reads headers only, and checks them against each other. Nothing in the folder is ever executed: `auto_map` is
ignored, pickles are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
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
MAX_JSON = 256 << 20  # bytes; DeepSeek-V3's index takes 9 MB


class CheckpointFolder:
    """A TensorSource over all shards of a folder. `tensors` goes shard by shard, each in its header's order."""

    def __init__(self, path: Path, config: dict[str, Any], files: list[SafetensorsFile]) -> None:
        self.path = path
        self.config = config
        self.architecture: Architecture = parse_architecture(config, str(path / CONFIG))
        self._shards = files
        self._owners = {name: file for file in files for name in file.tensors}
        self.tensors: Mapping[str, TensorInfo] = {name: info for file in files for name, info in file.tensors.items()}

    @classmethod
    def open(cls, path: Path) -> CheckpointFolder:
        """Raises CheckpointError, naming the file, for whatever is missing, damaged, contradictory or a pickle."""
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: there is no such folder",
                hint="model.path must name a folder with config.json and safetensors",
            )
        shards = _find_shards(path)
        config = read_json(path / CONFIG)
        files = [SafetensorsFile(path / name) for name in shards]
        for file in files:
            _check_index(file, shards[file.path.name])
        return cls(path, config, files)

    @property
    def files(self) -> list[Path]:
        """Every file the checkpoint consists of: config, index, shards, generation config, tokenizer."""
        others = [self.path / name for name in (CONFIG, INDEX, GENERATION_CONFIG)]
        return [f for f in others if f.is_file()] + [shard.path for shard in self._shards] + self.tokenizer_files

    @property
    def tokenizer_files(self) -> list[Path]:
        return [self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()]

    def read(self, name: str) -> RawTensor:
        """A view of the mapped file. Raises CheckpointError for a name that no shard has."""
        return self._owner(name).read(name)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Lets go of the resident pages of a tensor's bytes [begin, end), so that reading on does not add up."""
        self._owner(name).release(name, begin, end)

    def file_of(self, name: str) -> Path:
        """The shard that holds a tensor."""
        return self._owner(name).path

    def _owner(self, name: str) -> SafetensorsFile:
        if name not in self._owners:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")
        return self._owners[name]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError with the file's name, and the place in it."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", hint="copy it from the model's own repository")
    if path.stat().st_size > MAX_JSON:
        _fail(path, f"has {path.stat().st_size} bytes, too many for what it should be")
    try:
        value = parse_strict(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", hint="check its permissions") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}", hint="copy it again from the model") from error
    if not isinstance(value, dict):
        _fail(path, "is not a JSON object")
    return value


def _find_shards(path: Path) -> dict[str, set[str] | None]:
    """Shard file name -> the tensors that the index says it holds (None without an index)."""
    has_index, has_single = (path / INDEX).exists(), (path / SINGLE).exists()
    if has_index:
        shards = _read_index(path / INDEX)
        if has_single and SINGLE not in shards:
            problem = f"has both {SINGLE} and {INDEX}, which does not name it"
            _fail(path, problem, "delete the one that is not the model")
        _check_present(path, shards)
        return dict(shards)
    if has_single:
        return {SINGLE: None}
    _explain_absence(path)


def _read_index(path: Path) -> dict[str, set[str]]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(path, "has no weight_map, or an empty one")
    shards: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        # Every shard's name once: an index repeats it for each of up to 90,000 tensors.
        if not isinstance(name, str) or (name not in shards and not _is_plain(name)):
            _fail(path, f"places {tensor} in {name!r}, which is not the name of a file in the folder")
        if name.endswith(PICKLES):
            _fail(path, f"places {tensor} in {name}, a pickle", PICKLE_HINT)
        shards.setdefault(name, set()).add(tensor)
    return dict(sorted(shards.items()))


def _is_plain(name: str) -> bool:
    """A file's own name, no path: an index must not lead out of its folder."""
    return name.isprintable() and name not in ("", ".", "..") and PurePath(name).name == name and "\\" not in name


def _check_present(path: Path, shards: Mapping[str, set[str]]) -> None:
    # A link counts where its target does: the hub's own cache is made of links.
    missing = {name: tensors for name, tensors in shards.items() if not (path / name).is_file()}
    if missing:
        name, tensors = next(iter(missing.items()))
        more = f" (and {len(missing) - 1} more of {len(shards)} shards)" if len(missing) > 1 else ""
        is_there = (path / name).is_symlink() or (path / name).exists()
        what = "is a broken link or no regular file" if is_there else "is missing"
        raise CheckpointError(
            f"{path / name} {what}; it holds {len(tensors)} of the model's tensors, {min(tensors)} among them{more}",
            hint="finish the download or copy",
        )


def _check_index(file: SafetensorsFile, indexed: set[str] | None) -> None:
    if indexed is None or file.tensors.keys() == indexed:
        return
    hint = "the shards and the index are of two models"
    for tensor in sorted(indexed - file.tensors.keys()):
        _fail(file.path, f"does not hold {tensor}, which {INDEX} places there", hint)
    for tensor in sorted(file.tensors.keys() - indexed):
        _fail(file.path, f"holds {tensor}, which {INDEX} does not place there", hint)


def _explain_absence(path: Path) -> NoReturn:
    names = sorted(entry.name for entry in path.iterdir())
    pickles = [name for name in names if name.endswith(PICKLES)]
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        _fail(path, f"has {shards[0]}, but neither {INDEX} nor {SINGLE}", "copy the index from the model's repository")
    if pickles:
        _fail(path, f"holds pickles only ({pickles[0]}), which are not read", PICKLE_HINT)
    _fail(path, "holds no safetensors files", f"model.path must name a folder with {CONFIG} and {SINGLE}, or {INDEX}")


def _fail(path: Path, problem: str, hint: str = "copy the file again from the model") -> NoReturn:
    raise CheckpointError(f"{path} {problem}", hint=hint)
