"""Writing outputs: folders and texts are replaced in one step, so that a reader never meets half of one."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` that takes its place when the block ends without an error.

    The old folder is moved aside first and removed last: a folder cannot be renamed over one with files in it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fresh = scratch / "new"
        fresh.mkdir()
        yield fresh
        old = scratch / "old"
        if target.exists():
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def replace_text(target: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``target`` by way of a temporary file beside it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
