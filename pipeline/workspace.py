"""The folder a stage writes into, and the journal of its inner steps that lets a killed run go on where it was.

Apart from `stages/`, whose store makes these folders, because the packages that do a stage's work know only this.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipeline.digest import Identity, digest_file, identify
from pipeline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

JOURNAL = ".journal"


class Workspace(Protocol):
    """Where a stage writes its output: files go under `path`, which is renamed into place at the end."""

    @property
    def path(self) -> Path: ...

    def is_done(self, step: str) -> bool:
        """Whether this inner step was finished by an earlier, killed run, and its files are still what they were."""

    def finish(self, step: str, files: Sequence[Path]) -> None:
        """Makes `files` durable and records the inner step as done; from here on a killed run need not repeat it."""

    def require(self, nbytes: int) -> None:
        """Refuses now, with StoreError, what the disk could not hold later: `nbytes` are still to be written."""

    def recognise(self, file: Path, digest: str) -> None:
        """States the digest of a file, so that neither it nor a hard link to it need be read for it again."""


class FolderWorkspace:
    """A workspace over a plain folder. `journal` is where finished steps are recorded, by default in the folder.

    The journal is a file of JSON lines, each appended and fsynced after the files it speaks of were, so that a line is
    never more durable than they are. What follows a torn line is not believed.
    """

    def __init__(self, path: Path, *, journal: Path | None = None) -> None:
        self.path = path
        self.journal = journal or path / JOURNAL
        path.mkdir(parents=True, exist_ok=True)
        self._steps: dict[str, dict[str, tuple[int, str]]] = {}  # step -> relative path -> (size, digest)
        self._stats: dict[str, tuple[int, int, str]] = {}  # relative path -> (size, mtime_ns, digest), this run's own
        self._linkable: dict[Identity, str] = {}
        self._durable = 0  # bytes of the journal that parsed
        self._read_journal()

    def is_done(self, step: str) -> bool:
        files = self._steps.get(step)
        return files is not None and all(self._is_intact(name, *expected) for name, expected in files.items())

    def finish(self, step: str, files: Sequence[Path]) -> None:
        record = {}
        with ThreadPoolExecutor(1) as pool:  # the disk writes while the processor digests
            flushes = [pool.submit(flush, file) for file in files]
            for file in files:
                size, _, digest = self._digest(self._relative(file))
                record[self._relative(file)] = (size, digest)
            for flushed in flushes:
                flushed.result()
        for folder in {parent for file in files for parent in self._folders_of(file)}:
            flush(folder)
        line = json.dumps({"step": step, "files": record}).encode() + b"\n"
        with open(self.journal, "r+b" if self.journal.exists() else "w+b") as journal:
            journal.truncate(self._durable)  # a torn line would hide the ones after it
            journal.seek(self._durable)
            journal.write(line)
            journal.flush()
            os.fsync(journal.fileno())
        self._durable += len(line)
        self._steps[step] = record

    def require(self, nbytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise StoreError(
                f"{self.path}: {nbytes:,} bytes are still to be written, the disk has {free:,} left",
                hint="free some space, or set `output:` to a larger disk; finished steps are kept and not repeated",
            )

    def recognise(self, file: Path, digest: str) -> None:
        self._linkable[identify(file.stat())] = digest

    def files(self) -> list[Path]:
        """Every file written so far, sorted, without the journal."""
        return sorted(file for file in self.path.rglob("*") if file.is_file() and file != self.journal)

    def digest(self, file: Path) -> str:
        """A file's digest; not computed again where `finish` computed it and the file was not touched since."""
        return self._digest(self._relative(file))[2]

    def discard_unfinished(self) -> list[str]:
        """Deletes every file that no finished step accounts for (a killed run's half-written ones); their names."""
        kept = {name for files in self._steps.values() for name in files}
        stray = [file for file in self.files() if self._relative(file) not in kept]
        for file in stray:
            file.unlink()
        for folder in sorted((f for f in self.path.rglob("*") if f.is_dir()), reverse=True):
            if not any(folder.iterdir()):
                folder.rmdir()
        return [self._relative(file) for file in stray]

    def _read_journal(self) -> None:
        content = self.journal.read_bytes() if self.journal.is_file() else b""
        for line in content.splitlines(keepends=True):
            try:
                entry = json.loads(line)
                files = {name: (int(size), str(digest)) for name, (size, digest) in entry["files"].items()}
            except (ValueError, TypeError, KeyError, AttributeError):
                return
            if not line.endswith(b"\n"):
                return
            self._steps[entry["step"]] = files
            self._durable += len(line)

    def _is_intact(self, name: str, size: int, digest: str) -> bool:
        file = self.path / name
        return file.is_file() and file.stat().st_size == size and self._digest(name)[2] == digest

    def _digest(self, name: str) -> tuple[int, int, str]:
        status = (self.path / name).stat()
        known = self._stats.get(name)
        if known is None or known[:2] != (status.st_size, status.st_mtime_ns):
            # Past the cache: what a killed run left is to be checked by what it holds.
            digest = self._linkable.get(identify(status)) or digest_file(self.path / name, cached=False)
            known = self._stats[name] = (status.st_size, status.st_mtime_ns, digest)
        return known

    def _relative(self, file: Path) -> str:
        if not file.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(f"{file} is not in the workspace {self.path}")
        return file.resolve().relative_to(self.path.resolve()).as_posix()

    def _folders_of(self, file: Path) -> list[Path]:
        """The folders from the file's own up to the workspace's: their entries must be durable too."""
        names = Path(self._relative(file)).parents
        return [self.path / name for name in names]


def flush(path: Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a few network file systems refuse fsync on folders, and keep them in order
            raise
    finally:
        os.close(descriptor)


class NestedWorkspace:
    """A folder within another workspace, whose journal records its steps under the folder's name."""

    def __init__(self, outer: Workspace, name: str) -> None:
        self.outer, self.name, self.path = outer, name, outer.path / name
        self.path.mkdir(exist_ok=True)

    def is_done(self, step: str) -> bool:
        return self.outer.is_done(f"{self.name}/{step}")

    def finish(self, step: str, files: Sequence[Path]) -> None:
        self.outer.finish(f"{self.name}/{step}", files)

    def require(self, nbytes: int) -> None:
        self.outer.require(nbytes)

    def recognise(self, file: Path, digest: str) -> None:
        self.outer.recognise(file, digest)
