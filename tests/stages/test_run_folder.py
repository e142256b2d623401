from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pipeline.errors import StoreError
from pipeline.stages.run_folder import RunFolder


def test_a_full_disk_leaves_no_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "out")
    folder.write("a", {})
    folder.link("convert", tmp_path)
    before = {path.name for path in folder.path.iterdir()}
    assert before == {"run.json", "convert"}

    def fill_disk(self: Path, *arguments: object, **options: object) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_text", fill_disk)
    monkeypatch.setattr(Path, "rename", fill_disk)  # of a link, which is made before
    for work in (lambda: folder.write("a", {"convert": {}}), lambda: folder.link("quantize", tmp_path)):
        with pytest.raises(StoreError, match="the disk is full"):
            work()
    assert {path.name for path in folder.path.iterdir()} == before
    assert folder.read() == {}
