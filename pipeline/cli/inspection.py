"""What a path is, by looking at it, and what can be said about it as JSON. One describer per kind, tried in order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pipeline.cli.engine_inspection import (
    describe_engine,
    describe_engine_json,
    describe_engine_set,
    is_engine,
    is_engine_json,
    is_engine_set,
)
from pipeline.cli.file_inspection import (
    LOOKED_FOR,
    InspectionError,
    describe_file,
    describe_gguf_folder,
    is_gguf_folder,
    summarize_tensors,
)
from pipeline.cli.foreign_inspection import (
    describe_foreign_engine,
    describe_job,
    describe_ranks,
    is_foreign_engine,
    is_job,
    is_ranks,
)
from pipeline.cli.package_inspection import describe_llmapi, describe_repository, is_llmapi, is_repository
from pipeline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder

Document = dict[str, Any]


def describe(path: Path) -> Document:
    """The description of the first kind that fits, after that of the stage that made it, if one did."""
    _refuse_absence(path)
    stage = {"artifact": _describe_artifact(path)} if (path / "artifact.json").is_file() else {}
    for fits, describe_kind in KINDS:
        if fits(path):
            return {**stage, **describe_kind(path)}
    if stage:
        return stage
    raise InspectionError(f"{path}: is nothing that inspect knows", hint=LOOKED_FOR)


def _refuse_absence(path: Path) -> None:
    if path.exists():
        return
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise InspectionError(
                f"{place} is a link to {place.readlink()}, which is no longer in the store",
                hint="run `trtseek engine` again: it is made anew",
            )
    raise InspectionError(f"{path}: there is no such file or folder", hint=LOOKED_FOR)


def _is_checkpoint(path: Path) -> bool:
    from pipeline.checkpoint.shard_index import CONFIG, INDEX, SINGLE

    return any((path / name).is_file() for name in (CONFIG, INDEX, SINGLE))


def _is_run(path: Path) -> bool:
    from pipeline.stages.graph import NAMES
    from pipeline.stages.roots import RUN

    return (path / RUN).is_file() or any((path / name / "artifact.json").is_file() for name in NAMES)


def _describe_artifact(path: Path) -> Document:
    from pipeline.stages.artifact import DamagedError, read_marker

    try:
        artifact = read_marker(path)
    except DamagedError as error:
        raise StoreError(str(error), hint="run `trtseek engine` again: it is made anew") from None
    return {
        "stage": artifact.stage,
        "fingerprint": artifact.fingerprint,
        "created": artifact.created,
        "seconds": artifact.seconds,
        "files": len(artifact.files),
        "bytes": artifact.nbytes,
        "versions": dict(artifact.versions),
    }


def _describe_checkpoint(path: Path) -> Document:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.shard_index import CONFIG
    from pipeline.checkpoint.strict_json import read_json

    read_json(path / CONFIG)  # first what it says is broken, then what is missing beside it
    folder = CheckpointFolder.open(path)
    architecture = folder.architecture
    tensors = summarize_tensors(folder.tensors.values())
    ours = folder.own
    return {
        "kind": "engine checkpoint" if ours else "Hugging Face checkpoint",
        "path": str(path),
        "architecture": architecture.name,
        "layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "heads": architecture.num_heads,
        "key_value_heads": None if architecture.latent else architecture.num_kv_heads,
        "latent_width": architecture.latent.latent_dim if architecture.latent else None,
        "routed_experts": architecture.experts.num_routed if architecture.experts else None,
        "experts_per_token": architecture.experts.top_k if architecture.experts else None,
        "shared_experts": architecture.experts.num_shared if architecture.experts else None,
        "vocabulary": architecture.vocab_size,
        "context": architecture.max_position_embeddings,
        "dtype": architecture.dtype,
        "bytes": sum(row["bytes"] for row in tensors),
        "rope": {"kind": architecture.rope.kind, "theta": architecture.rope.theta, **architecture.rope.scaling},
        "quantization": _describe_quantization(ours.quantization) if ours else _describe_stated(folder),
        "tensors": tensors,
    }


def _describe_stated(folder: CheckpointFolder) -> Document | None:
    """What another tool says of its quantization: whose it is, and its plain values."""
    from pipeline.checkpoint.engine_config import QUANTIZATION_KEY
    from pipeline.checkpoint.foreign.methods import find_method, find_settings

    method = find_method(folder)
    stated = folder.config.get(QUANTIZATION_KEY) if method is None else find_settings(folder, method).values
    if not isinstance(stated, dict):
        return None
    plain = {key: value for key, value in stated.items() if isinstance(value, str | int | float)}
    return {"quant_method": method, **plain}


def _describe_quantization(quantization: Mapping[str, Any] | None) -> Document | None:
    if not quantization:
        return None
    kinds = Counter(
        (linear.get("format"), linear.get("group_size")) for linear in quantization.get("quantized", {}).values()
    )
    return {
        **{key: value for key, value in quantization.items() if key != "quantized"},
        "linears": [
            {"format": name, "group_size": group, "count": count}
            for (name, group), count in sorted(kinds.items(), key=str)
        ],
    }


def _describe_run(path: Path) -> Document:
    """Of every stage that ran: how it went last, and the result that is shown."""
    from pipeline.stages.graph import NAMES
    from pipeline.stages.run_folder import RunFolder

    last = RunFolder(path).read()
    rows = [_describe_stage(path, name, last.get(name, {})) for name in NAMES]
    return {"kind": "run", "path": str(path), "name": path.resolve().name, "stages": [row for row in rows if row]}


def _describe_stage(path: Path, name: str, entry: Document) -> Document | None:
    from pipeline.stages.artifact import DamagedError, read_marker

    link, report = path / name, path / f"{name}.failed"
    row: Document = {"stage": name, "state": entry.get("state"), "files": None, "bytes": None, "created": None}
    if not link.is_symlink() and not link.exists():
        return {**row, "path": str(report) if report.exists() else None} if entry else None
    try:
        artifact = read_marker(link)
    except FileNotFoundError:
        row["state"] = "no longer in the store"
    except DamagedError:
        row["state"] = "damaged"
    else:
        row |= {"state": "made", "files": len(artifact.files), "bytes": artifact.nbytes, "created": artifact.created}
    return {**row, "path": str(link)}


KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Document]], ...] = (
    (is_foreign_engine, describe_foreign_engine),
    (is_job, describe_job),
    (is_engine, describe_engine),
    (is_engine_set, describe_engine_set),
    (is_engine_json, describe_engine_json),
    (lambda path: path.is_file(), describe_file),
    (_is_run, _describe_run),
    (is_repository, describe_repository),
    (is_llmapi, describe_llmapi),
    (is_ranks, describe_ranks),
    (is_gguf_folder, describe_gguf_folder),
    (_is_checkpoint, _describe_checkpoint),
)
