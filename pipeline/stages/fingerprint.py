"""What decides a stage's output: a record, and one digest over it.

The record: the stage's name and version, its parameters after defaults, the fingerprints of the stages it reads, the
digests of the source files it reads, the versions of the libraries that decide its bytes, the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.digest import cached_digest, digest_file, digest_json
from pipeline.errors import ConfigError
from pipeline.progress import SILENT
from pipeline.stages.versions import find_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.progress import Progress
    from pipeline.stages.graph import Stage

Record = dict[str, Any]
# What reading a source may cost before a plan says "not read yet" instead: a fraction of a second.
READ_AT_ONCE = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """`digest` is "blake3:…" over `record`."""

    digest: str
    record: Record


class Fingerprinter:
    """Computes the fingerprints of a config's stages, in the stages' order. A source that several read is read once."""

    def __init__(self, config: Config, progress: Progress = SILENT) -> None:
        self.config = config
        self._progress = progress
        self._prints: dict[str, Fingerprint] = {}
        self._sources: dict[tuple[str, ...], list[list[str]]] = {}

    def fingerprint(self, stage: Stage) -> Fingerprint:
        """The stages it reads that apply to the config must have been asked for before."""
        record = self._record(stage, self._digest)
        found = self._prints[stage.name] = Fingerprint(digest=digest_json(record), record=record)
        return found

    def outline(self, stage: Stage) -> Record:
        """The record as far as it is known without reading a source: None for other files' digests, inputs left out."""
        return self._record(stage, lambda _, files: [[known_as, cached_digest(path)] for known_as, path in files])

    def _record(self, stage: Stage, digest: Callable[[str, list[tuple[str, Path]]], Any]) -> Record:
        return {
            "stage": stage.name,
            "version": stage.version,
            "parameters": dict(stage.parameters(self.config)),
            "inputs": {name: self._prints[name].digest for name in stage.inputs if name in self._prints},
            "sources": {name: digest(name, files) for name, files in self.list_sources(stage).items()},
            "libraries": {name: find_version(name) for name in stage.libraries},
            "target": stage.target(self.config) if stage.target else None,
        }

    def unread_bytes(self, stage: Stage) -> int:
        """How much of the stage's sources would have to be read to know its fingerprint; 0 where that is quick."""
        unread = sum(_unread(files) for files in self.list_sources(stage).values())
        return unread if unread > READ_AT_ONCE else 0

    def list_sources(self, stage: Stage) -> dict[str, list[tuple[str, Path]]]:
        """A stage's source files by source name, each with the name it is known by."""
        sources = stage.sources(self.config)
        return {name: list_source(paths, owner=f"{stage.name}: {name}") for name, paths in sources.items()}

    def _digest(self, name: str, files: Sequence[tuple[str, Path]]) -> list[list[str]]:
        key = tuple(str(path) for _, path in files)
        if key not in self._sources:
            unread = _unread(files)
            if unread > READ_AT_ONCE:
                self._progress.start(f"reading {name} for its digests", unread, "B")
            advance = self._progress.advance if unread > READ_AT_ONCE else None
            self._sources[key] = [
                [known_as, cached_digest(path) or digest_file(path, on_bytes=advance)] for known_as, path in files
            ]
        return self._sources[key]


def list_source(paths: Sequence[Path], *, owner: str) -> list[tuple[str, Path]]:
    """The files a source consists of, in order, with the names they are known by wherever they lie.

    A file is known by its own name, a file in a folder by its path from there. Hidden files and folders (`.git`,
    `.cache`) are no part of a source. A path that does not exist is a ConfigError naming `owner`.
    """
    files: list[tuple[str, Path]] = []
    for path in paths:
        if path.is_dir():
            found = sorted(
                (file.relative_to(path).as_posix(), file)
                for file in path.rglob("*")
                if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
            )
            files.extend(found)
        elif path.is_file():
            files.append((path.name, path))
        else:
            raise ConfigError(f"{owner}: {path} does not exist", hint="paths are relative to the current folder")
    return files


def _unread(files: Sequence[tuple[str, Path]]) -> int:
    return sum(path.stat().st_size for _, path in files if cached_digest(path) is None)
