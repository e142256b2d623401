"""What stands where a file is wanted, and which file's name is the nearest."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

ABSENT = "there is no such file"


def explain_absence(path: Path) -> str:
    """Why `path`, which is no regular file, cannot be read: what follows its name in a message."""
    if path.is_dir():
        return "is a folder, where a file is wanted"
    if path.exists():
        return "is no regular file"
    if path.is_symlink():
        return f"is a link to nothing ({os.readlink(path)})"
    return ABSENT


def find_near(name: str, folder: Path, pattern: str = "*", *, folders: bool = False) -> str | None:
    """The name in `folder` that is nearest to one that no file, or no folder, has there."""
    known = [entry.name for entry in folder.glob(pattern) if (entry.is_dir() if folders else entry.is_file())]
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)
