"""`manifest.json` and `SHA256SUMS`: what a release pipeline publishes beside a package, and checks it by.

The manifest says what the package is (model, target, settings, gates, versions) and lists every file; SHA256SUMS lists
every file and the manifest, in the format of `sha256sum -c`. Neither holds a time, and paths stand as the config writes
them, so equal input gives equal text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import __version__
from pipeline.digest import sha256_file
from pipeline.errors import PackageError, spell_reason
from pipeline.progress import SILENT, Progress

if TYPE_CHECKING:
    from pipeline.config.schema import Config

FORMAT = 1
MANIFEST, SUMS = "manifest.json", "SHA256SUMS"
# The artifact store's own marker, written into the folder after its content.
STORE_MARKER = "artifact.json"
# What reading a manifest that anybody may have edited raises.
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
# Distributions whose versions a reader of a report wants to know.
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "tensorrt-rtx", "tritonclient", "protobuf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a package serves. digest: of the engine; None where a checkpoint is loaded as it is. sm: None where nobody
    says what it was built on. networks: digests of those that were proved for it, one for each rank."""

    backend: str
    backend_version: str | None
    sm: int | None
    digest: str | None
    networks: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDamage:
    """What differs between a folder and its SHA256SUMS; file names relative to the folder."""

    changed: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changed or self.missing or self.extra)

    def __str__(self) -> str:
        groups = (("changed", self.changed), ("missing", self.missing), ("not listed", self.extra))
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in groups if names)


def write_manifest(
    folder: Path,
    *,
    config: Config,
    built: Built,
    verification: Mapping[str, Any],
    checkpoint_config: Mapping[str, Any],
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Writes both files into `folder`, over everything in it, and returns the manifest.

    `verification` is verify.json, `checkpoint_config` the engine checkpoint's config.json. Raises PackageError where
    the engine's network is not the proved one, or a gate did not pass: such a package is none.
    """
    _check_proof(built, verification)
    files = list_files(folder)
    progress.start("SHA-256", sum((folder / name).stat().st_size for name in files), "B")
    sums = {name: sha256_file(folder / name, progress.advance) for name in files}
    manifest = {
        "format": FORMAT,
        "name": config.name,
        "trtseek": __version__,
        "model": {
            "architecture": checkpoint_config["architectures"][0],
            "source": config.model.path.name,
            "dtype": checkpoint_config["trtseek"]["dtype"],
            "quantization": _summarize_quantization(checkpoint_config["trtseek"].get("quantization")),
        },
        "target": {
            "gpu": config.target.gpu,
            "sm": built.sm,
            "backend": built.backend,
            "backend_version": built.backend_version,
        },
        "network_digest": verification["network_digest"],
        "engine_digest": built.digest,
        "gates": verification["gates"],
        "libraries": {name: version for name in LIBRARIES if (version := _find_version(name))},
        # Where it was made does not matter, nor whether it was tried in a server.
        "config": config.model_dump(
            mode="json", exclude={"output": True, "store": True, "stages": {"package": {"check"}}}
        ),
        "files": {name: {"sha256": sums[name], "size": (folder / name).stat().st_size} for name in files},
    }
    text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    sums[MANIFEST] = hashlib.sha256(text.encode()).hexdigest()
    lines = (f"{sums[name]}  {name}\n" for name in sorted(sums))
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    return manifest


def check_release(folder: Path, *, progress: Progress = SILENT) -> ReleaseDamage:
    """Compares every file of `folder` with its SHA256SUMS. Falsy where nothing differs.

    Raises PackageError where SHA256SUMS cannot be read, or lists other files than the manifest.
    """
    sums = _read_sums(folder / SUMS)
    present = set(list_files(folder)) | ({MANIFEST} if (folder / MANIFEST).is_file() else set())
    common = sorted(present & sums.keys())
    progress.start("SHA-256", sum((folder / name).stat().st_size for name in common), "B")
    damage = ReleaseDamage(
        changed=tuple(name for name in common if sha256_file(folder / name, progress.advance) != sums[name]),
        missing=tuple(sorted(sums.keys() - present)),
        extra=tuple(sorted(present - sums.keys())),
    )
    if not damage:
        _check_manifest(folder / MANIFEST, sums)
    return damage


def find_wrong_sizes(folder: Path) -> list[str]:
    """What shows of damage without reading a file: those that are missing, or of another size than the manifest says.

    Raises PackageError where the manifest is none."""
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        wanted = {str(name): int(entry["size"]) for name, entry in entries.items()}
    except (*DAMAGED, OSError) as error:
        raise PackageError(
            f"{folder / MANIFEST}: is not a manifest: {spell_reason(error)}", hint="package it again"
        ) from error
    problems = []
    for name, size in sorted(wanted.items()):
        if not (folder / name).is_file():
            problems.append(f"{folder / name} is missing")
        elif (found := (folder / name).stat().st_size) != size:
            problems.append(f"{folder / name} has {found:,} bytes, {MANIFEST} says {size:,}")
    return problems


def list_files(folder: Path) -> list[str]:
    """Every file of a package, sorted, relative and with "/": without the two that list them and the store's marker."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    if odd := [name for name in names if not name.isprintable() or "\\" in name]:
        raise PackageError(f"{folder}: the file name {odd[0]!r} cannot be listed in {SUMS}", hint="rename the file")
    return [name for name in names if name not in (MANIFEST, SUMS, STORE_MARKER) and not name.startswith(".journal")]


def _check_proof(built: Built, verification: Mapping[str, Any]) -> None:
    proved = verification.get("rank_digests") or [verification["network_digest"]]
    if list(built.networks) != proved:
        raise PackageError(
            f"the engine is of network {', '.join(built.networks)}, verify.json of {', '.join(proved)}",
            hint="run verify and build again",
        )
    failed = [gate["name"] for gate in verification["gates"] if gate["passed"] is False]
    if failed:
        raise PackageError(f"gates that failed: {', '.join(failed)}", hint="see verify.json")


def _summarize_quantization(quantization: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Without the list of every linear, which config.json has."""
    if quantization is None:
        return None
    linears: Sequence[str] | Mapping[str, object] = quantization.get("quantized", ())
    return {**{k: v for k, v in quantization.items() if k != "quantized"}, "linears": len(linears)}


def _find_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _read_sums(path: Path) -> dict[str, str]:
    return dict(_parse_sums(path))


def _parse_sums(path: Path) -> Iterator[tuple[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PackageError(
            f"{path}: {spell_reason(error)}", hint="a release has this file beside its manifest"
        ) from error
    for number, line in enumerate(text.splitlines(), 1):
        digest, separator, name = line.partition("  ")
        is_hex = len(digest) == 64 and all(c in "0123456789abcdef" for c in digest)
        if not separator or not is_hex or name.startswith("/") or ".." in name.split("/"):
            raise PackageError(f"{path}:{number}: is not a line of sha256sum")
        yield name, digest


def _check_manifest(path: Path, sums: Mapping[str, str]) -> None:
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        listed = {name: entry["sha256"] for name, entry in files.items()}
    except (*DAMAGED, OSError) as error:
        raise PackageError(f"{path}: is not a manifest: {spell_reason(error)}") from error
    if listed != {name: digest for name, digest in sums.items() if name != MANIFEST}:
        raise PackageError(f"{path} and {SUMS} list different files or digests", hint="one of them was edited")
