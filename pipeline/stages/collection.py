"""What a store holds that nothing uses, and its removal, which is safe beside runs at work.

In use is what a run folder links (a stage's result, a failed stage's report), what that was made from, what a killed
run can go on with, what another process holds, and what is linked from outside of the store: a package's files are
hard links, and so are those of a repository that was copied with `cp -al`.

Removal holds an artifact's lock alone and looks at the run folders again under it. A run holds it shared from finding
an artifact until its link is there, so either the run finds the artifact gone, or its link is seen here.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.stages.artifact import DamagedError, read_marker
from pipeline.stages.disk import explain_disk_errors
from pipeline.stages.locks import try_hold
from pipeline.stages.roots import list_links, list_run_folders
from pipeline.stages.run_folder import RunFolder
from pipeline.stages.store import PARTIAL, TRASH

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.stages.store import Store

Kind = Literal["artifact", "partial", "rest"]
Inode = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """One folder of a store. `used` says by what, empty where it is garbage; `nbytes` is what its removal frees."""

    path: Path
    kind: Kind
    stage: str
    fingerprint: str  # hex digits, as many as the folder's name has; empty for what a removal left behind
    nbytes: int
    used: str


def survey(store: Store) -> list[Holding]:
    """Everything in the store, in-use first, then by path. Reads names and sizes only. StoreError."""
    with explain_disk_errors(store.root):
        found = list(_list_folders(store))
        uses = _Uses(store)
        names = Counter(inode for path, *_ in found for inode, _ in _list_inodes(path))
        verdicts = [(entry, uses.find(*entry) or _find_outside_link(entry[0], names)) for entry in found]
        garbage = Counter(i for (path, *_), used in verdicts if not used for i, _ in _list_inodes(path))
        holdings = []
        for (path, kind, stage, fingerprint), used in verdicts:
            # A file that something in use links too frees nothing; one that only garbage links counts once.
            nbytes = 0
            for inode, status in _list_inodes(path):
                if used:
                    nbytes += status.st_size
                elif garbage[inode] == status.st_nlink:
                    nbytes += status.st_size
                    garbage[inode] = 0
            holdings.append(
                Holding(path=path, kind=kind, stage=stage, fingerprint=fingerprint, nbytes=nbytes, used=used)
            )
        return sorted(holdings, key=lambda holding: (not holding.used, holding.path))


def remove(store: Store, garbage: Sequence[Holding]) -> list[Holding]:
    """Removes what `survey` called garbage and still is; those removed. StoreError."""
    removed = []
    with explain_disk_errors(store.root):
        for holding in garbage:
            lock = store.lock_file(holding.stage, holding.fingerprint)
            if holding.kind == "rest":
                shutil.rmtree(holding.path, ignore_errors=True)
                removed.append(holding)
                continue
            with try_hold(lock) as alone:
                used = _Uses(store).find(holding.path, holding.kind, holding.stage, holding.fingerprint, held=alone)
                if not alone or used or not holding.path.exists():
                    continue
                trash = store.root / f"{TRASH}{uuid.uuid4().hex}"
                holding.path.rename(trash)  # gone at once, whatever becomes of the removal
            shutil.rmtree(trash, ignore_errors=True)
            removed.append(holding)
    return removed


class _Uses:
    """What the run folders of a store show and remember, read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._linked: dict[Path, str] = {}
        self._remembered: dict[str, str] = {}  # folder name of a partial -> the run that can go on with it
        for folder in list_run_folders(store.root):
            for name, target in list_links(folder, store.root).items():
                self._linked.setdefault(target, f"{folder / name} shows it")
            for stage, entry in RunFolder(folder).read().items():
                partial = store.partial_folder(stage, entry["fingerprint"])
                if entry["state"] in ("begun", "stopped", "failed"):
                    self._remembered[partial.name] = f"{folder.name} can go on with it"
        self._ancestors = self._find_ancestors()

    def find(self, path: Path, kind: Kind, stage: str, fingerprint: str, *, held: bool = False) -> str:
        """By what a folder is used; empty where by nothing. `held`: the caller has its lock."""
        if kind == "rest":
            return ""
        real = path.resolve()
        if kind == "artifact":
            used = self._linked.get(real) or self._ancestors.get(real, "")
        else:
            used = self._linked.get(real / "files") or self._remembered.get(path.name, "")
        return used or ("" if held else self._find_holder(stage, fingerprint))

    def _find_holder(self, stage: str, fingerprint: str) -> str:
        lock = self._store.lock_file(stage, fingerprint)
        if not lock.exists():
            return ""
        with try_hold(lock) as alone:
            return "" if alone else "a run is at work on it"

    def _find_ancestors(self) -> dict[Path, str]:
        """What linked artifacts were made from, and what that was made from."""
        found: dict[Path, str] = {}
        waiting = list(self._linked)
        while waiting:
            path = waiting.pop()
            for stage, fingerprint in _list_inputs(path).items():
                place = self._store.place(stage, fingerprint).resolve()
                if place not in found:
                    found[place] = f"{path.parent.name}/{path.name[:12]} was made from it"
                    waiting.append(place)
        return found


def _list_inputs(path: Path) -> Mapping[str, str]:
    try:
        inputs: Mapping[str, str] = read_marker(path).record["inputs"]
    except (DamagedError, FileNotFoundError, KeyError):
        return {}
    return inputs


def _list_folders(store: Store) -> Iterator[tuple[Path, Kind, str, str]]:
    if not store.root.is_dir():
        return
    for entry in sorted(store.root.iterdir()):
        if entry.name.startswith(TRASH):
            yield entry, "rest", "", ""
        elif entry.name == PARTIAL:
            for partial in sorted(entry.iterdir()):
                stage, _, fingerprint = partial.name.rpartition("-")
                yield partial, "partial", stage, fingerprint
        elif entry.is_dir() and not entry.name.startswith("."):
            for artifact in sorted(entry.iterdir()):
                if artifact.is_dir() and _is_hex(artifact.name):
                    yield artifact, "artifact", entry.name, artifact.name


def _is_hex(name: str) -> bool:
    """A folder that somebody put into the store by hand is none of ours to remove."""
    return bool(name) and all(character in "0123456789abcdef" for character in name)


def _list_inodes(folder: Path) -> Iterator[tuple[Inode, os.stat_result]]:
    """Every name of a file below the folder, by what it names. What goes meanwhile is left out."""
    for path, _, files in os.walk(folder):
        for file in files:
            try:
                status = os.lstat(os.path.join(path, file))
            except FileNotFoundError:
                continue
            yield (status.st_dev, status.st_ino), status


def _find_outside_link(folder: Path, names: Mapping[Inode, int]) -> str:
    for inode, status in _list_inodes(folder):
        if status.st_nlink > names[inode]:
            return "its files are linked from outside of the store"
    return ""
