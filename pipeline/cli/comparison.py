"""Two runs, stage outputs, checkpoints or engines, and what differs between them, as JSON; one comparer per kind."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import StoreError, TrtseekError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pipeline.progress import Progress

Document = dict[str, Any]
Row = dict[str, Any]
REPORT = "verify.json"


class ComparisonError(TrtseekError):
    """The two paths hold nothing that can be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One side. `folders` are what it consists of, by stage, or by "checkpoint" or "engine" where no stage made it."""

    path: Path
    records: Mapping[str, Document]
    folders: Mapping[str, Path]


def compare_paths(a: Path, b: Path, progress: Progress) -> Document:
    """What differs from `a` to `b`. Parts that are in only one, and parts of the same bytes, are not looked into."""
    one, other = read_subject(a), read_subject(b)
    pairs = _pair(one, other)
    if not pairs:
        raise ComparisonError(
            f"{a} ({', '.join(one.folders)}) and {b} ({', '.join(other.folders)}) have nothing in common",
            hint="compare two runs, two outputs of one stage, two checkpoints, or two engines",
        )
    document: Document = {
        "a": str(a),
        "b": str(b),
        "only_in_a": sorted(one.folders.keys() - other.folders.keys()) if len(pairs) > 1 else [],
        "only_in_b": sorted(other.folders.keys() - one.folders.keys()) if len(pairs) > 1 else [],
        "settings": _compare_records(one, other),
        "parts": {name: _compare_parts(left, right, progress) for name, (left, right) in pairs.items()},
    }
    different = [document[key] for key in ("only_in_a", "only_in_b", "settings")]
    document["same"] = not any(different) and all(part["same"] for part in document["parts"].values())
    return document


def read_subject(path: Path) -> Subject:
    """A run's folder, a stage's output, a checkpoint, an engine or its folder."""
    from pipeline.stages.artifact import MARKER
    from pipeline.stages.graph import NAMES
    from pipeline.stages.roots import RUN
    from pipeline.stages.run_folder import RunFolder

    if (path / RUN).is_file():
        stages = RunFolder(path).read()
        folders = {name: path / name for name in NAMES if (path / name / MARKER).is_file()}
        return Subject(path=path, records={name: entry["record"] for name, entry in stages.items()}, folders=folders)
    if (path / MARKER).is_file():
        artifact = _read_marker(path)
        return Subject(path=path, records={artifact.stage: dict(artifact.record)}, folders={artifact.stage: path})
    for name, fits, _ in KINDS:
        if fits(path):
            return Subject(path=path, records={}, folders={name: path})
    raise ComparisonError(
        f"{path}: {'is nothing that can be compared' if path.exists() else 'there is no such file or folder'}",
        hint="name a run's folder (out/<name>), a stage's output, a checkpoint's folder, or an engine",
    )


def _pair(one: Subject, other: Subject) -> dict[str, tuple[Path, Path]]:
    common = [name for name in one.folders if name in other.folders]
    if common:
        return {name: (one.folders[name], other.folders[name]) for name in common}
    if len(one.folders) == len(other.folders) == 1:  # a stage's output and another's, or what no stage made
        ((left, first),), ((right, second),) = one.folders.items(), other.folders.items()
        if _kind(first) is _kind(second) is not None:
            return {f"{left} and {right}": (first, second)}
    return {}


def _compare_records(one: Subject, other: Subject) -> list[Row]:
    from pipeline.stages.change import explain_change

    return [
        {"stage": stage, "change": line}
        for stage in one.records
        if stage in other.records
        for line in explain_change(one.records[stage], other.records[stage])
        if not line.endswith(" changed") or ": " in line  # of an input: its own lines say what
    ]


def _compare_parts(a: Path, b: Path, progress: Progress) -> Document:
    versions, same = _compare_markers(a, b)
    if same:
        return {"same": True}
    compare = _kind(a)
    part = compare(a, b, progress) if compare is not None and compare is _kind(b) else _compare_files(a, b)
    return {**part, "versions": versions, "same": not any(part.values())}


def _compare_markers(a: Path, b: Path) -> tuple[list[Row], bool]:
    """Versions that differ, and whether both hold the same bytes by their markers."""
    from pipeline.stages.artifact import MARKER

    if a.resolve() == b.resolve():
        return [], True
    if not ((a / MARKER).is_file() and (b / MARKER).is_file()):
        return [], False
    one, other = _read_marker(a), _read_marker(b)
    names = sorted({*one.versions, *other.versions})
    rows = [{"name": name, "a": one.versions.get(name), "b": other.versions.get(name)} for name in names]
    return [row for row in rows if row["a"] != row["b"]], one.content == other.content


def _read_marker(path: Path) -> Any:
    from pipeline.stages.artifact import DamagedError, read_marker

    try:
        return read_marker(path)
    except DamagedError as error:
        raise StoreError(str(error), hint="run `trtseek engine` again: it is made anew") from None


def _compare_checkpoints(a: Path, b: Path, progress: Progress) -> Document:
    from pipeline.checkpoint.difference import compare_tensors
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.stages.change import explain_values

    one, other = CheckpointFolder.open(a), CheckpointFolder.open(b)
    return {
        "config": explain_values(_drop_linears(one.config), _drop_linears(other.config)),
        "tensors": _describe_tensors(asdict(compare_tensors(one, other, progress))),
    }


def _describe_tensors(found: Document) -> Document:
    same = found.pop("same")
    return {**found, "same": same} if any(found.values()) else {}


def _drop_linears(config: Document) -> Document:
    """Without the list of every quantized linear: the tensors say it."""
    own = config.get("trtseek")
    if not isinstance(own, dict) or not isinstance(own.get("quantization"), dict):
        return config
    quantization = {key: value for key, value in own["quantization"].items() if key != "quantized"}
    return {**config, "trtseek": {**own, "quantization": quantization}}


def _compare_engines(a: Path, b: Path, _: Progress) -> Document:
    from pipeline.cli.inspection import describe

    one, other = describe(a), describe(b)
    # Two builds of one network differ in some bytes: what they do is compared, not how they are spelled.
    figures = [
        {"name": name, "a": one.get(name), "b": other.get(name)}
        for name in ("version", "targets", "weights_bytes", "network_digest")
        if one.get(name) != other.get(name)
    ]
    return {
        "figures": figures,
        "profiles": _compare_rows(one["profiles"], other["profiles"], "profile", ("workspace_bytes", "kernels")),
        "kernels": _compare_rows(one["kernels"], other["kernels"], "kind", ("launches",)),
        "fusions": _compare_rows(one["fusions"], other["fusions"], "fused", ("launches",)),
        "inputs": _compare_rows(one["inputs"], other["inputs"], "name", ("dtype", "shape")),
        "outputs": _compare_rows(one["outputs"], other["outputs"], "name", ("dtype", "shape")),
    }


def _compare_rows(one: list[Row], other: list[Row], key: str, values: tuple[str, ...]) -> list[Row]:
    """Records of two tables that differ, by their key: each value as it is in a and in b."""
    left, right = ({row[key]: row for row in rows} for rows in (one, other))
    rows = []
    for name in dict.fromkeys((*left, *right)):
        for value in values:
            before, after = left.get(name, {}).get(value), right.get(name, {}).get(value)
            if before != after:
                rows.append({key: name, "figure": value, "a": before, "b": after})
    return rows


def _compare_verifications(a: Path, b: Path, _: Progress) -> Document:
    one, other = _read_report(a), _read_report(b)
    digests = [{"name": "network_digest", "a": one["network_digest"], "b": other["network_digest"]}]
    return {
        "figures": digests if one["network_digest"] != other["network_digest"] else [],
        "gates": _compare_rows(one["gates"], other["gates"], "name", ("value", "bound", "passed")),
    }


def _read_report(path: Path) -> Document:
    file, hint = path / REPORT, "run `trtseek engine` again with --force verify"
    try:
        report = json.loads(file.read_bytes())
        return {"network_digest": report["network_digest"], "gates": [dict(gate) for gate in report["gates"]]}
    except OSError as error:
        raise StoreError(f"{file}: {error.strerror}", hint=hint) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"{file} is damaged: {error}", hint=hint) from None


def _compare_files(a: Path, b: Path) -> Document:
    """Of whatever has a marker and is of no kind that is known: which files differ."""
    one, other = _read_marker(a), _read_marker(b)
    rows = []
    for name in sorted({*one.files, *other.files}):
        before, after = one.files.get(name), other.files.get(name)
        if before is None or after is None:
            rows.append({"file": name, "change": "removed" if after is None else "added"})
        elif before.digest != after.digest:
            rows.append({"file": name, "change": f"{before.size:,} → {after.size:,} bytes"})
    return {"files": rows}


def _kind(path: Path) -> Callable[[Path, Path, Progress], Document] | None:
    return next((compare for _, fits, compare in KINDS if fits(path)), None)


KINDS: tuple[tuple[str, Callable[[Path], bool], Callable[[Path, Path, Progress], Document]], ...] = (
    ("engine", lambda path: path.suffix == ".engine" or any(path.glob("*.engine")), _compare_engines),
    ("checkpoint", lambda path: (path / "config.json").is_file(), _compare_checkpoints),
    ("verification", lambda path: (path / REPORT).is_file(), _compare_verifications),
)
