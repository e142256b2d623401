"""`engine.json`: what stands beside an engine, so that a runner, a release or a reader need not open it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.digest import digest_json
from pipeline.engine.document import read_document
from pipeline.engine.limits import FULL, BuildLimits
from pipeline.errors import BuildError, CompatibilityError
from pipeline.network.spec import NetworkSpec

FORMAT = 1
DESCRIPTION = "engine.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDescription:
    """An engine input or output: -1 in `shape` is a size that a step chooses."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRange:
    """Smallest, preferred and largest shape of an input in one profile."""

    minimum: tuple[int, ...]
    optimum: tuple[int, ...]
    maximum: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDescription:
    """One optimization profile. `workspace_bytes` as the engine file states it, None where the file is not readable."""

    name: str
    phase: str  # "context" or "generation"
    shapes: Mapping[str, ShapeRange]
    workspace_bytes: int | None
    kernels: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelDescription:
    """A plugin's kernel in the engine. source: digest of its module. sm: that its PTX is for. registers, spills: of a
    thread, bytes of the latter; shared: bytes of a program. passed: the device and day of a recorded run of
    benchmarks/gpu.py that it passed on this SM, None where there is none."""

    function: str
    source: str
    sm: int
    threads: int
    registers: int
    spills: int
    shared: int
    passed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginDescription:
    """An operation that is a plugin in so many layers."""

    operation: str
    layers: int
    kernels: tuple[KernelDescription, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecord:
    """How the build went: wall time, and the build process's peak memory. `peak_bytes` counts mapped weight files too,
    which the kernel can drop; `peak_anonymous_bytes` (sampled) does not."""

    seconds: float
    peak_bytes: int
    peak_anonymous_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """All that is known about a built engine.

    sources: digest of each checkpoint file that went in, by its name. weights_bytes: on the GPU, None where the engine
    file is not readable (`tensorrt`). weights: "full", or "stripped" where refit.json beside the engine lists what it
    still lacks. weight_streaming: whether a runner may leave a part of the weights in host memory. plugins: those that
    the spec's lowering asks for. ranks: of a parallel model, the other ranks' engines; this is rank 0's.
    """

    file: str
    nbytes: int
    digest: str
    backend: str
    backend_version: str
    sm: int
    network_digest: str
    spec: NetworkSpec
    limits: BuildLimits
    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]
    profiles: tuple[ProfileDescription, ...]
    weights_bytes: int | None
    sources: Mapping[str, str]
    build: BuildRecord
    weights: str = FULL
    weight_streaming: bool = False
    plugins: tuple[PluginDescription, ...] = ()
    ranks: tuple[EngineDescription, ...] = ()

    @property
    def all_ranks(self) -> tuple[EngineDescription, ...]:
        """Itself first, without the others in it."""
        return (replace(self, ranks=()), *self.ranks)

    @property
    def set_digest(self) -> str:
        """Of all ranks' engines; the engine's own where it is the only one."""
        return digest_json([rank.digest for rank in self.all_ranks]) if self.ranks else self.digest

    @property
    def workspace_bytes(self) -> int | None:
        """Device memory for one execution context that may use any profile: the largest profile's."""
        sizes = [profile.workspace_bytes for profile in self.profiles]
        return None if None in sizes else max(size for size in sizes if size is not None)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **self._to_values()}, indent=2) + "\n"

    def _to_values(self) -> dict[str, Any]:
        values = {**asdict(self), "spec": json.loads(self.spec.to_json())}
        return {**values, "ranks": [rank._to_values() for rank in self.ranks]}


def load_description(path: Path) -> EngineDescription:
    """Reads an `engine.json`, or the one in a folder. Raises BuildError where it is missing, damaged or newer."""
    path = path / DESCRIPTION if path.is_dir() else path
    hint = "run the build stage again"
    values = read_document(path, kind="an engine description", version=FORMAT, hint=hint)
    try:
        return _from_json(values)
    except (KeyError, TypeError, ValueError, AttributeError, CompatibilityError) as error:
        raise BuildError(f"{path}: does not describe an engine: {error}", hint=hint) from None


def _from_json(values: dict[str, Any]) -> EngineDescription:
    if not (isinstance(values["file"], str) and isinstance(values["sources"], dict)):
        raise TypeError("file must be a name, sources an object")
    return EngineDescription(
        **{
            **values,
            "spec": NetworkSpec.from_json(json.dumps(values["spec"])),
            "limits": BuildLimits.from_json(values["limits"]),
            "inputs": tuple(_tensor(tensor) for tensor in values["inputs"]),
            "outputs": tuple(_tensor(tensor) for tensor in values["outputs"]),
            "profiles": tuple(_profile(profile) for profile in values["profiles"]),
            "build": BuildRecord(**values["build"]),
            "plugins": tuple(map(read_plugin, values.get("plugins", ()))),
            "ranks": tuple(map(_from_json, values.get("ranks", ()))),
        }
    )


def read_plugin(values: dict[str, Any]) -> PluginDescription:
    kernels = tuple(KernelDescription(**kernel) for kernel in values["kernels"])
    return PluginDescription(**{**values, "kernels": kernels})


def _tensor(values: dict[str, Any]) -> TensorDescription:
    return TensorDescription(**{**values, "shape": tuple(values["shape"])})


def _profile(values: dict[str, Any]) -> ProfileDescription:
    shapes = {
        name: ShapeRange(**{bound: tuple(shape) for bound, shape in bounds.items()})
        for name, bounds in values["shapes"].items()
    }
    return ProfileDescription(**{**values, "shapes": shapes})
