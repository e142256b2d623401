"""The folder that trtllm-build makes: config.json, a rank{N}.engine for each rank, and a receipt where build.sh ran.

It comes from another machine, so nothing in it is believed: no link is followed, no name but the known ones is read.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.digest import sha256_file
from pipeline.engine.tensorrt_llm.job import SUMS
from pipeline.errors import BuildError

CONFIG, RECEIPT = "config.json", "receipt.json"
RANK = re.compile(r"rank(0|[1-9]\d{0,4})\.engine")
# What is taken along; whatever else is there stays there.
KNOWN = re.compile(
    rf"{RANK.pattern}|rank\d+_managed_weights\.safetensors|config\.json|quant_cfg\.json|receipt\.json|SHA256SUMS|build\.log"
)
VERSION = re.compile(r"\d[\w.+-]{0,40}")
MAX_JSON = 16 << 20  # bytes; a real one has some thousand
SHOWN = 8  # of what is missing
_HINT = "give the folder that build.sh (or trtllm-build --output_dir) wrote, whole and without links"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFolder:
    """`config`: config.json; `files`: the known ones with their sizes in bytes; `receipt`: build.sh's, None where
    trtllm-build was run by other means."""

    path: Path
    config: Mapping[str, Any]
    files: Mapping[str, int]
    receipt: Mapping[str, Any] | None

    @property
    def version(self) -> str:
        """TensorRT-LLM's, as config.json states it."""
        return str(self.config["version"])

    @property
    def world(self) -> int:
        """Ranks, as config.json states it."""
        return int(self.config["pretrained_config"]["mapping"]["world_size"])

    @property
    def ranks(self) -> list[int]:
        """Those whose engine is there, in order."""
        return sorted(int(found[1]) for found in map(RANK.fullmatch, self.files) if found)

    def find_gaps(self) -> list[str]:
        """What of the files is missing, empty or too much."""
        missing = sorted(set(range(self.world)) - set(self.ranks))
        extra = sorted(set(self.ranks) - set(range(self.world)))
        problems = [f"rank{rank}.engine is missing, of {self.world} rank(s)" for rank in missing[:SHOWN]]
        problems += [f"{len(missing) - SHOWN} more are missing"] if len(missing) > SHOWN else []
        problems += [f"rank{rank}.engine is one too many, of {self.world} rank(s)" for rank in extra]
        return problems + [f"{name} is empty" for name, size in self.files.items() if not size and RANK.fullmatch(name)]

    def find_damage(self, on_bytes: Callable[[int], None] | None = None) -> list[str]:
        """The same, and what is not what SHA256SUMS says; reads the files whole where that is there."""
        return [*self.find_gaps(), *(self._compare_sums(on_bytes) if SUMS in self.files else [])]

    def _compare_sums(self, on_bytes: Callable[[int], None] | None) -> list[str]:
        if self.files[SUMS] > MAX_JSON:
            return [f"{SUMS} has more than {MAX_JSON >> 20} MiB"]
        text = (self.path / SUMS).read_text(encoding="utf-8", errors="replace")
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}
        problems = [f"{name!a} is named in {SUMS} and missing" for name in sums if name not in self.files][:SHOWN]
        for name in self.files:
            if name == SUMS:
                continue
            if name not in sums:
                problems.append(f"{name} is not named in {SUMS}")
            elif sha256_file(self.path / name, on_bytes) != sums[name]:
                problems.append(f"{name} is not what {SUMS} says: cut off or changed on the way")
        return problems


def read_engine_folder(path: Path) -> EngineFolder:
    """Raises BuildError where the folder is none, holds a link or anything but plain files under a known name, or its
    JSON is damaged or does not state a version and a mapping."""
    if not path.is_dir():
        raise BuildError(f"{path}: {'is not a folder' if path.exists() else 'there is no such folder'}", hint=_HINT)
    files = {}
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if not KNOWN.fullmatch(entry.name):
            continue
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            what = "a link" if entry.is_symlink() else "no plain file"
            raise BuildError(f"{path / entry.name}: is {what}", hint=_HINT)
        files[entry.name] = status.st_size
    if CONFIG not in files:
        raise BuildError(f"{path}: holds no {CONFIG}", hint=_HINT)
    config = _read_object(path / CONFIG)
    _check_shape(path / CONFIG, config)
    receipt = _read_object(path / RECEIPT) if RECEIPT in files else None
    return EngineFolder(path=path, config=config, files=files, receipt=receipt)


def is_engine_folder(path: Path) -> bool:
    """Whether a folder looks like one of TensorRT-LLM's, whatever state it is in."""
    return (path / "rank0.engine").exists() and (path / CONFIG).exists()


def _read_object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"more than {MAX_JSON >> 20} MiB")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}", hint=_HINT) from None
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{path}: damaged: {error}", hint="copy the folder again") from None
    if not isinstance(values, dict):
        raise BuildError(f"{path}: holds no JSON object", hint="copy the folder again")
    return values


def _check_shape(path: Path, config: Mapping[str, Any]) -> None:
    """What is read without looking again."""
    version = config.get("version")
    if not isinstance(version, str) or not VERSION.fullmatch(version):
        raise BuildError(f"{path}: states no version of TensorRT-LLM", hint=_HINT)
    for keys in (("build_config",), ("pretrained_config",), ("pretrained_config", "mapping")):
        values: Any = config
        for key in keys:
            values = values.get(key)
            if not isinstance(values, dict):
                raise BuildError(f"{path}: states no {'.'.join(keys)}: not an engine's", hint=_HINT)
    world = config["pretrained_config"]["mapping"].get("world_size")
    if type(world) is not int or not 1 <= world <= 99999:
        raise BuildError(f"{path}: pretrained_config.mapping.world_size is {world!r}", hint=_HINT)
