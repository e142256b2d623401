"""Versions of installed distributions, from their metadata: nothing of them is imported.

Read here rather than with importlib.metadata, whose import (email, socket, csv) takes longer than all else that a
fingerprint needs. The layout: packaging.python.org, "Recording installed projects".
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache

_SUFFIX = ".dist-info"


def find_version(name: str) -> str | None:
    """The version of the distribution `name`, None where it is not installed."""
    folder = _list_distributions().get(_normalize(name))
    return _read_version(folder) if folder is not None else None


@cache
def _list_distributions() -> dict[str, str]:
    """Normalized name -> its .dist-info folder; the first on sys.path counts, as for an import."""
    found: dict[str, str] = {}
    for place in sys.path:
        try:
            entries = os.listdir(place or ".")
        except OSError:  # a zip file, or a place that is not there
            continue
        for entry in entries:
            if entry.endswith(_SUFFIX):
                name = entry[: -len(_SUFFIX)].rpartition("-")[0]
                found.setdefault(_normalize(name), os.path.join(place, entry))
    return found


@cache
def _read_version(folder: str) -> str | None:
    try:
        with open(os.path.join(folder, "METADATA"), encoding="utf-8") as file:
            for line in file:
                if line.startswith("Version:"):
                    return line.partition(":")[2].strip()
                if not line.strip():  # the end of the headers
                    break
    except OSError:
        pass  # half uninstalled
    return None


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
