"""`out/<name>/`: what a user looks at. A link per stage to the artifact of the current config, and `run.json`.

A link is there only while it shows what the config as it is now makes: a run that stops half-way (a failed gate) leaves
no link to an older package beside it. The stages after --until keep theirs: the run is not about them. The artifacts
themselves stay in the store.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

from pipeline.errors import StoreError
from pipeline.stages.disk import explain_disk_errors
from pipeline.stages.roots import RUN, register
from pipeline.stages.sealed import seal, unseal
from pipeline.text_file import write_text

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 2


class RunFolder:
    """One config's folder. `run.json` holds, per stage, the fingerprint, its record, and how the stage went last."""

    def __init__(self, path: Path, *, store: Path | None = None) -> None:
        """`store` is told of the folder before the first link into it, so that nothing linked here is collected."""
        self.path = path
        self._store = store

    def read(self) -> dict[str, Any]:
        """`stages` of run.json; empty where there was no run, or none that can be read."""
        try:
            document = unseal((self.path / RUN).read_bytes())
            return dict(document["stages"]) if document["format"] == FORMAT else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def write(self, name: str, stages: dict[str, Any]) -> None:
        """Replaces run.json at once, never in part."""
        with explain_disk_errors(self.path):
            write_text(self.path / RUN, seal({"format": FORMAT, "name": name, "stages": stages}))

    def link(self, name: str, target: Path) -> None:
        """Points `name` at `target` with a relative link, so that the output folder can be moved as a whole."""
        link = self.path / name
        with explain_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            relative = os.path.relpath(target.resolve(), self.path.resolve())
            if link.is_symlink() and os.readlink(link) == relative:
                return
            self._refuse_foreign(link)
            if self._store is not None:
                register(self._store, self.path)
            draft = self.path / f".link-{uuid.uuid4().hex}"
            try:
                draft.symlink_to(relative)
                draft.rename(link)
            finally:
                draft.unlink(missing_ok=True)

    def unlink(self, name: str) -> None:
        link = self.path / name
        with explain_disk_errors(self.path):
            if os.path.lexists(link):
                self._refuse_foreign(link)
                link.unlink()

    def shows(self, name: str, target: Path) -> bool:
        return (self.path / name).resolve() == target.resolve()

    def _refuse_foreign(self, link: Path) -> None:
        if os.path.lexists(link) and not link.is_symlink():
            raise StoreError(
                f"{link} is in the way: it is not a link that a run has made",
                hint="move it elsewhere; everything under this folder is written by trtseek",
            )
