"""What a run's folder holds, gathered for the report; and `report.html` beside its links.

The page is no stage's output: it tells of times, which differ from run to run, and of stages that failed. It carries a
key made of what it shows, so that it is written again only when that changed.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pipeline.digest import digest_json
from pipeline.stages.artifact import DamagedError, read_marker
from pipeline.stages.graph import NAMES
from pipeline.stages.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pipeline.config.schema import Config

PAGE = "report.html"
VERSION = 5  # of the page; one of another version is written again
DOCUMENTS = {"verify": "verify.json", "quantize": "quantization.json"}


def write_report(config: Config, path: Path | None = None) -> Path | None:
    """Writes the page, unless the one there shows the same, and returns its path; None where nothing was made yet."""
    from pipeline.stages.disk import explain_disk_errors

    target = path or config.run_folder / PAGE
    outline = outline_run(config)
    if not outline["stages"]:
        return None
    if not _is_current(target, outline["key"]):
        from pipeline.evaluation.report.page import write_run

        with explain_disk_errors(target.parent):
            write_run(outline | _read_documents(config.run_folder), target)
    return target


def outline_run(config: Config) -> dict[str, Any]:
    """Stages with times and sizes, by their markers and the files themselves. A failed verify stage counts: it has a
    report, too."""
    folder = config.run_folder
    records = RunFolder(folder).read()
    stages, sizes, prints = [], [], []
    if (source := _measure_source(config)) is not None:
        sizes.append({"name": "source", "bytes": source})
    for name in NAMES:
        place, failed = folder / name, folder / f"{name}.failed"
        entry = records.get(name, {})
        try:
            artifact = read_marker(place)
            size = _measure(place / file for file in artifact.files)
        except (OSError, DamagedError):
            if failed.exists() and entry:
                stages.append({"name": name, "seconds": entry["seconds"], "bytes": 0, "state": "failed"})
                prints.append([name, "failed", entry["fingerprint"], entry["seconds"]])
            continue
        stages.append({"name": name, "seconds": artifact.seconds, "bytes": artifact.nbytes, "state": ""})
        prints.append([name, artifact.fingerprint, artifact.content, artifact.seconds])
        if name in SIZED:
            sizes.append({"name": SIZED[name], "bytes": size})
    return {
        "key": digest_json([VERSION, config.name, prints]),
        "name": config.name,
        "subtitle": f"{config.model.path.name} for {config.target.gpu} with {config.target.backend}",
        "stages": stages,
        "sizes": sizes,
        "complete": bool(stages) and stages[-1]["name"] == NAMES[-1] and not stages[-1]["state"],
    }


def _read_documents(folder: Path) -> dict[str, Any]:
    """The JSON of the stages that say more."""
    verification, quantization = (_read(folder, name, file) for name, file in DOCUMENTS.items())
    return {"verify": verification, "quantization": quantization}


WEIGHTS, ENGINE = ".safetensors", ".engine"
# Stage -> what of it has a size worth a bar.
SIZED = {"convert": "converted weights", "quantize": "quantized weights", "build": "engine"}


def _measure(files: Iterable[Path]) -> int:
    """Bytes of weights and engines among them. Raises OSError."""
    return sum(
        _count_weights(file) if file.suffix == WEIGHTS else file.stat().st_size
        for file in files
        if file.suffix in (WEIGHTS, ENGINE)
    )


def _count_weights(file: Path) -> int:
    """Bytes of a safetensors file's tensors, as the quality table counts them: all that follows the header, whose
    length the first 8 bytes give."""
    with open(file, "rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    return max(0, file.stat().st_size - 8 - header)


def _measure_source(config: Config) -> int | None:
    with suppress(OSError):
        return _measure(config.model.path.iterdir()) or None
    return None


def _read(folder: Path, stage: str, name: str) -> Any:
    for place in (folder / stage, folder / f"{stage}.failed"):
        with suppress(OSError, ValueError):
            return json.loads((place / name).read_text(encoding="utf-8"))
    return None


def _is_current(path: Path, key: str) -> bool:
    with suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
        return f'name="trtseek-report" content="{key}"' in file.read(2048)
    return False
