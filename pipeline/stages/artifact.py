"""A stage's committed output: a folder whose `artifact.json`, written last, states every file's size and digest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.digest import digest_file, digest_json
from pipeline.stages.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MARKER = "artifact.json"
FORMAT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    size: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """What `artifact.json` says. Equal output has equal `content`: one digest over all files' names and digests."""

    path: Path
    stage: str
    fingerprint: str
    record: Mapping[str, Any]  # what the fingerprint was made from
    inputs: Mapping[str, str]  # input stage -> content of the artifact that was read
    files: Mapping[str, FileRecord]  # by path relative to the folder, "/" between names
    versions: Mapping[str, str]
    created: str
    seconds: float

    @property
    def content(self) -> str:
        return content_of(self.files)

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def find_damage(self, *, full: bool = False) -> str | None:
        """What is wrong with the files, or None.

        A file of the recorded size and time is believed, one of another time is digested; `full` digests every file.
        Files that were added (a `__pycache__`, a desktop's droppings) are no damage: nobody is told of them.
        """
        for name, record in self.files.items():
            file = self.path / name
            try:
                status = os.stat(file)
            except (FileNotFoundError, NotADirectoryError):
                return f"{file} is gone"
            if status.st_size != record.size:
                return f"{file} holds {status.st_size:,} bytes, {record.size:,} were written"
            doubted = full or status.st_mtime_ns != record.mtime_ns
            if doubted and digest_file(file, cached=not full) != record.digest:
                return f"{file} was changed since it was written"
        return None


class DamagedError(Exception):
    """An artifact's folder is there, and its marker is missing or cannot be believed."""


def content_of(files: Mapping[str, FileRecord]) -> str:
    return digest_json({name: [record.size, record.digest] for name, record in files.items()})


def write_marker(artifact: Artifact) -> None:
    """Writes `artifact.json` into the artifact's folder and makes it durable."""
    document = {
        "format": FORMAT,
        "stage": artifact.stage,
        "fingerprint": artifact.fingerprint,
        "record": artifact.record,
        "inputs": artifact.inputs,
        "content": artifact.content,
        "files": {
            name: {"size": record.size, "digest": record.digest, "mtime_ns": record.mtime_ns}
            for name, record in sorted(artifact.files.items())
        },
        "versions": artifact.versions,
        "created": artifact.created,
        "seconds": round(artifact.seconds, 3),
    }
    with open(artifact.path / MARKER, "w", encoding="utf-8") as file:
        file.write(seal(document))
        file.flush()
        os.fsync(file.fileno())


def read_marker(path: Path) -> Artifact:
    """The artifact in the folder `path`. FileNotFoundError where there is no folder; DamagedError."""
    if not path.is_dir():
        if path.exists():
            raise DamagedError(f"{path} is not a folder")
        raise FileNotFoundError(path)
    marker = path / MARKER
    try:
        document = unseal(marker.read_bytes())
        if document["format"] != FORMAT:
            raise DamagedError(f"{marker} is of format {document['format']}, this version reads {FORMAT}")
        artifact = Artifact(
            path=path,
            stage=document["stage"],
            fingerprint=document["fingerprint"],
            record=document["record"],
            inputs=document["inputs"],
            files={name: FileRecord(**record) for name, record in document["files"].items()},
            versions=document["versions"],
            created=document["created"],
            seconds=document["seconds"],
        )
    except FileNotFoundError as error:
        raise DamagedError(f"{marker} is gone") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{marker} cannot be read ({error})") from error
    return artifact
