"""Which run folders link into a store: what they show is in use, and everything else may be collected.

Run folders beside the store are found by looking; one elsewhere, of an output that shares the store, is written down
in `<store>/.roots` before its first link. Paths are relative to the store, so that both can be moved together.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROOTS = ".roots"
RUN = "run.json"


def register(store: Path, run_folder: Path) -> None:
    """Makes a run folder known to the store. Nothing is written where it is known already, or found by looking."""
    relative = os.path.relpath(run_folder.resolve(), store.resolve())
    if _is_beside(relative):
        return
    root = store / ROOTS / hashlib.sha256(os.fsencode(relative)).hexdigest()[:32]
    if root.exists():
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    draft = root.with_name(f".draft-{uuid.uuid4().hex}")
    draft.write_bytes(os.fsencode(relative))
    draft.rename(root)


def list_run_folders(store: Path) -> list[Path]:
    """Every run folder known to the store that is still there, sorted."""
    return sorted({folder for folder in _find(store) if folder.is_dir()})


def _find(store: Path) -> Iterator[Path]:
    here = store.resolve()
    for entry in here.parent.iterdir() if here.parent.is_dir() else ():
        # A run that was killed early has links, or a link's draft, and no run.json yet.
        if entry != here and entry.is_dir() and ((entry / RUN).exists() or _links_into(entry, here)):
            yield entry
    for root in (here / ROOTS).iterdir() if (here / ROOTS).is_dir() else ():
        if not root.name.startswith("."):
            yield (here / os.fsdecode(root.read_bytes())).resolve()


def list_links(run_folder: Path, store: Path) -> dict[str, Path]:
    """The links of a run folder by name, with the places below the store's real path that they lead to."""
    here, there = store.resolve(), run_folder.resolve()
    links = {}
    for entry in os.listdir(there):
        try:
            target = (there / os.readlink(there / entry)).resolve()
        except OSError:  # no link, or replaced at this moment: then under another name in the same listing
            continue
        if target.is_relative_to(here):
            links[entry] = target
    return links


def _links_into(folder: Path, store: Path) -> bool:
    try:
        return bool(list_links(folder, store))
    except OSError:
        return False


def _is_beside(relative: str) -> bool:
    return relative.startswith(os.pardir + os.sep) and os.sep not in relative[3:] and relative[3:] != os.pardir
