"""GPUs by name, from `gpus.yaml`: memory, compute capability, features, and which builder targets them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from pipeline.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One row of the table. `sm` is the compute capability as 80, 89, 120; bandwidth in GB/s (10^9), memory in GiB."""

    name: str
    sm: int
    memory_gib: float
    bandwidth_gb_s: float
    features: frozenset[str]
    backends: tuple[str, ...]  # the builders that can target it
    aliases: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)  # backend -> what a user must know before buying into it

    def has(self, feature: str) -> bool:
        """Whether the tensor cores take `feature`: bf16, fp8 or fp4."""
        return feature in self.features

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)


@cache
def _table() -> dict[str, Any]:
    text = resources.files("pipeline.config").joinpath("gpus.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return data


@cache
def load_gpus() -> dict[str, GPU]:
    """Every GPU of the table by its canonical name, in the table's order."""
    generations = _table()["generations"]
    gpus = {}
    for name, row in _table()["gpus"].items():
        generation = generations[row["sm"]]
        gpus[name] = GPU(
            name=name,
            sm=row["sm"],
            memory_gib=float(row["memory_gib"]),
            bandwidth_gb_s=float(row["bandwidth_gb_s"]),
            features=frozenset(generation["features"]),
            backends=tuple(generation["backends"]),
            aliases=tuple(row.get("aliases", ())),
            notes=generation.get("notes", {}),
        )
    return gpus


def supported_sms(backend: str) -> tuple[int, ...]:
    """Compute capabilities that `backend` builds for."""
    rows = _table()["generations"].items()
    return tuple(sm for sm, row in rows if backend in row["backends"])


def find_gpu(name: str) -> GPU:
    """The GPU called `name`, in any case, with or without separators. ConfigError lists the nearest names."""
    keys = {_fold(key): gpu for gpu in load_gpus().values() for key in (gpu.name, *gpu.aliases)}
    if (gpu := keys.get(_fold(name))) is not None:
        return gpu
    near = difflib.get_close_matches(_fold(name), keys, n=4, cutoff=0.5)
    names = list(dict.fromkeys(keys[key].name for key in near))
    every = f"known names: {', '.join(load_gpus())}"
    hint = f"nearest names: {', '.join(names)}; `trtseek schema` lists all" if names else every
    raise ConfigError(f"no GPU is called {name!r}", hint=hint)


def _fold(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum()).removeprefix("nvidia").removeprefix("geforce")
