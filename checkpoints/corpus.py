"""The text: Debian's python3.11-doc, split by document into training, calibration and held-out parts."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoints.folder import replace_folder, replace_text

ROOT = Path(__file__).resolve().parent
TEXT = ROOT / "text"
CACHE = ROOT.parent / "out" / "cache" / "python-doc"

PACKAGE = "python3.11-doc"
SOURCES = "usr/share/doc/python3.11/html/_sources"
NOTICE = f"usr/share/doc/{PACKAGE}/copyright"

HELDOUT_BYTES = 200_000
CALIBRATION_BYTES = 600_000
# One long page would make up a third of the held-out text and decide the perplexity alone.
LONGEST_SHIPPED_DOCUMENT = 60_000


class CorpusError(Exception):
    """The training text could not be obtained or is not what the split expects."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents by name, in three parts that share no document."""

    training: Mapping[str, str]
    calibration: Mapping[str, str]
    heldout: Mapping[str, str]
    version: str


def fetch_package(cache: Path = CACHE) -> Path:
    """Download and unpack the package into ``cache`` (not installed); return the unpacked root.

    Raises CorpusError without apt, or when it cannot reach the archive.
    """
    unpacked = cache / "unpacked"
    if (unpacked / SOURCES).is_dir():
        return unpacked
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise CorpusError(f"{' and '.join(missing)} not found\nHint: the text is a Debian package; use a Debian host.")
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob(f"{PACKAGE}_*.deb")):
        attempts = (["apt-get", "download", PACKAGE], ["apt-get", "update"], ["apt-get", "download", PACKAGE])
        for command in attempts:
            done = subprocess.run(command, cwd=cache, capture_output=True, text=True, check=False)
            if list(cache.glob(f"{PACKAGE}_*.deb")):
                break
        else:
            raise CorpusError(
                f"apt-get could not download {PACKAGE}: {done.stderr.strip() or done.stdout.strip()}\n"
                "Hint: it is in Debian 12 (bookworm) main; check the network and /etc/apt/sources.list."
            )
    package = sorted(cache.glob(f"{PACKAGE}_*.deb"))[-1]
    with replace_folder(unpacked) as fresh:
        done = subprocess.run(["dpkg-deb", "-x", str(package), str(fresh)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CorpusError(f"{package} does not unpack: {done.stderr.strip()}\nHint: remove it and run again.")
        (fresh / "VERSION").write_text(package.stem.split("_")[1] + "\n", encoding="utf-8")
    return unpacked


def read_documents(unpacked: Path) -> dict[str, str]:
    """Return every reStructuredText page by its name, such as ``library/os``, in name order."""
    sources = unpacked / SOURCES
    pages = sorted(sources.rglob("*.rst.txt"))
    if not pages:
        raise CorpusError(f"no *.rst.txt below {sources}: is this {PACKAGE}?")
    return {
        str(page.relative_to(sources)).removesuffix(".rst.txt"): page.read_text(encoding="utf-8").strip() + "\n"
        for page in pages
    }


def split_documents(documents: Mapping[str, str], version: str) -> Corpus:
    """Deal the documents out by a hash of their name, so that a new package version moves no page.

    Pages too long for the shipped texts always go to training.
    """
    order = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
    parts: dict[str, list[str]] = {"heldout": [], "calibration": [], "training": []}
    sizes = {"heldout": 0, "calibration": 0}
    limits = {"heldout": HELDOUT_BYTES, "calibration": CALIBRATION_BYTES}
    for name in order:
        size = len(documents[name].encode())
        part = "training"
        if size <= LONGEST_SHIPPED_DOCUMENT:
            part = next((key for key in limits if sizes[key] < limits[key]), part)
        parts[part].append(name)
        if part in sizes:
            sizes[part] += size
    texts = {part: {name: documents[name] for name in sorted(names)} for part, names in parts.items()}
    return Corpus(version=version, **texts)


def load_corpus() -> Corpus:
    """Fetch the package where needed and return its split documents."""
    unpacked = fetch_package()
    version = (unpacked / "VERSION").read_text(encoding="utf-8").strip()
    return split_documents(read_documents(unpacked), version)


def read_notice() -> str:
    """Return the package's own copyright file: the PSF licence and those of what Python incorporates."""
    return (fetch_package() / NOTICE).read_text(encoding="utf-8")


def write_texts(corpus: Corpus, folder: Path = TEXT) -> None:
    """Write the shipped texts, the list of their documents and the licence notice into ``folder``."""
    for part in ("calibration", "heldout"):
        documents: Mapping[str, str] = getattr(corpus, part)
        replace_text(folder / f"{part}.txt", "\n".join(documents.values()))
    split = {
        "package": PACKAGE,
        "version": corpus.version,
        "heldout": sorted(corpus.heldout),
        "calibration": sorted(corpus.calibration),
        "training": sorted(corpus.training),
    }
    replace_text(folder / "documents.json", json.dumps(split, indent=1) + "\n")
    replace_text(folder / "NOTICE", read_notice())


if __name__ == "__main__":
    try:
        write_texts(load_corpus())
    except CorpusError as error:
        sys.exit(f"error: {error}")
