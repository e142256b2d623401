"""The content-addressed store: what a stage makes is kept under its fingerprint and never made twice.

    store/
      convert/1f0c…/            a committed artifact; artifact.json inside lists its files
      .partial/convert-<fingerprint>/   being made: files/, the journal of finished steps, begin.json
      .locks/  digests.jsonl

A partial folder becomes an artifact by one rename, after every file in it, and then `artifact.json`, reached the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import stat
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pipeline
from pipeline.stages.artifact import Artifact, DamagedError, FileRecord, read_marker, write_marker
from pipeline.stages.disk import explain_disk_errors
from pipeline.stages.locks import hold
from pipeline.workspace import FolderWorkspace, Workspace, flush

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

__all__ = ["Finding", "FolderWorkspace", "Partial", "Store", "Workspace"]

NOT_FOUND = "not in the store"
PARTIAL, TRASH = ".partial", ".trash-"
SHORT = 32  # hex digits of the fingerprint in a folder's name; the whole one is in artifact.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What the store has under a fingerprint: an artifact, or the reason why there is none to use."""

    artifact: Artifact | None
    reason: str = ""

    def without(self, reason: str) -> Finding:
        """The same, as if nothing had been found."""
        return Finding(artifact=None, reason=reason)


class Partial(FolderWorkspace):
    """The workspace of one fingerprint in the store; survives the run that made it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "files", journal=folder / "journal")
        self.folder = folder
        self.needed = 0  # as `require` was told, for the message when the disk fills all the same
        self.opened = time.monotonic()

    def require(self, nbytes: int) -> None:
        self.needed = nbytes
        super().require(nbytes)

    @property
    def finished_steps(self) -> list[str]:
        return list(self._steps)


class Store:
    """One store folder, used by any number of runs at once. Every method raises StoreError where the disk refuses."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def digests(self) -> Path:
        """Where the digests of source files are remembered."""
        return self.root / "digests.jsonl"

    def prepare(self) -> None:
        """Creates the folder, and finds out now whether it can be written to."""
        with explain_disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".probe-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()

    def place(self, stage: str, fingerprint: str) -> Path:
        return self.root / stage / _hex(fingerprint)[:SHORT]

    def lock_file(self, stage: str, fingerprint: str) -> Path:
        return self.root / ".locks" / f"{stage}-{_hex(fingerprint)[:SHORT]}.lock"

    def has(self, stage: str, fingerprint: str) -> bool:
        """Whether there is anything in the artifact's place, believed or not."""
        return os.path.lexists(self.place(stage, fingerprint))

    def partial_folder(self, stage: str, fingerprint: str) -> Path:
        return self.root / PARTIAL / f"{stage}-{_hex(fingerprint)}"

    def find(
        self, stage: str, fingerprint: str, *, inputs: Mapping[str, str] | None = None, full: bool = False
    ) -> Finding:
        """Looks an artifact up and checks it; `inputs` are the contents that its inputs have now, where known.

        The fingerprint names inputs by *their* fingerprints; an engine, built twice, differs. So what was made from
        other bytes than the ones now in the store is not used. `full` digests every file.
        """
        with explain_disk_errors(self.root):
            try:
                artifact = read_marker(self.place(stage, fingerprint))
                if artifact.fingerprint != fingerprint or artifact.stage != stage:
                    raise DamagedError(f"{artifact.path} belongs to another fingerprint, {artifact.fingerprint}")
                damage = artifact.find_damage(full=full)
            except FileNotFoundError:
                return Finding(artifact=None, reason=NOT_FOUND)
            except DamagedError as error:
                return Finding(artifact=None, reason=f"damaged: {error}")
        if damage is not None:
            return Finding(artifact=None, reason=f"damaged: {damage}")
        for name, content in (inputs or {}).items():
            if artifact.inputs.get(name) != content:
                return Finding(artifact=None, reason=f"was made from an earlier output of {name}")
        return Finding(artifact=artifact)

    @contextlib.contextmanager
    def lock(self, stage: str, fingerprint: str, *, shared: bool, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Holds an artifact: alone to make or replace it, shared to read it."""
        with contextlib.ExitStack() as stack:
            with explain_disk_errors(self.root):
                stack.enter_context(hold(self.lock_file(stage, fingerprint), shared=shared, on_wait=on_wait))
            yield

    def open_partial(self, stage: str, fingerprint: str, *, inputs: Mapping[str, str], fresh: bool = False) -> Partial:
        """The folder to make an artifact in; the caller holds the lock.

        What an earlier run finished under the same fingerprint, from the same input bytes, is kept, and nothing else;
        `fresh` keeps nothing.
        """
        folder = self.partial_folder(stage, fingerprint)
        begin = {"fingerprint": fingerprint, "inputs": dict(sorted(inputs.items()))}
        with explain_disk_errors(folder):
            if folder.exists() and (fresh or _read_json(folder / "begin.json") != begin):
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "begin.json").write_text(json.dumps(begin))
            partial = Partial(folder)
            partial.discard_unfinished()
            flush(folder)
        return partial

    def count_finished_steps(self, stage: str, fingerprint: str) -> int:
        """How many inner steps a killed run left behind; reads only."""
        try:
            return (self.partial_folder(stage, fingerprint) / "journal").read_bytes().count(b"\n")
        except OSError:
            return 0

    def commit(
        self,
        partial: Partial,
        *,
        stage: str,
        fingerprint: str,
        record: Mapping[str, Any],
        inputs: Mapping[str, str],
        versions: Mapping[str, str],
    ) -> Artifact:
        """Makes the partial folder the artifact, replacing one that is there. The caller holds the lock."""
        place = self.place(stage, fingerprint)
        with explain_disk_errors(partial.path, needed=lambda: partial.needed):
            files = {}
            for file in partial.files():
                digest = partial.digest(file)
                flush(file)
                status = file.stat()
                if status.st_nlink == 1:  # not shared with a folder that is the user's own
                    file.chmod(stat.S_IMODE(status.st_mode) & ~0o222)
                name = file.relative_to(partial.path).as_posix()
                files[name] = FileRecord(size=status.st_size, mtime_ns=status.st_mtime_ns, digest=digest)
            artifact = Artifact(
                path=partial.path,
                stage=stage,
                fingerprint=fingerprint,
                record=record,
                inputs=inputs,
                files=files,
                versions={"trtseek": pipeline.__version__, "python": platform.python_version(), **versions},
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                seconds=time.monotonic() - partial.opened,
            )
            write_marker(artifact)
            for folder in (*(f for f in partial.path.rglob("*") if f.is_dir()), partial.path):
                flush(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(place):
                place.rename(self.root / f"{TRASH}{uuid.uuid4().hex}")
            partial.path.rename(place)
            flush(place.parent)
            for left_over in (partial.folder, *self.root.glob(f"{TRASH}*")):
                shutil.rmtree(left_over, ignore_errors=True)
        return read_marker(place)


def _hex(fingerprint: str) -> str:
    return fingerprint.rpartition(":")[2]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
