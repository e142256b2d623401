"""Files of text that appear whole or not at all: a reader, or a killed writer, never meets half of one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by `text`, UTF-8; its folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
