"""TensorRT-LLM, TensorRT, Triton's images, CUDA and Python: what belongs together, from `versions.yaml`.

An engine of TensorRT-LLM is loaded only by the release that built it: TensorRT refuses a plan of another version, and
the plugins in it are of TensorRT-LLM's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

# The one release whose checkpoints and builds this backend writes for.
VERSION = "1.2.1"
_TAG = re.compile(r":(?P<release>\d\d\.\d\d)-trtllm-python-py3(@sha256:[0-9a-f]{64})?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release of TensorRT-LLM and its requirements, as pip spells them; None where they are not stated."""

    version: str
    engines: bool
    tensorrt: str | None
    torch: str | None
    transformers: str | None
    modelopt: str | None
    cuda: str | None
    python: str | None

    @property
    def series(self) -> str:
        """10.14.1 of TensorRT-LLM 1.2.1: what its requirement of TensorRT, ~=10.14.1, begins with."""
        return (self.tensorrt or "").removeprefix("~=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A release of Triton's container with TensorRT-LLM (`YY.MM`) and what is in it; None where it is not stated."""

    release: str
    tensorrt_llm: str
    tensorrt: str | None
    cuda: str | None
    python: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether an engine and an image belong together; if not, why, and what to do."""

    fits: bool
    reason: str
    way_out: str = ""


@cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    text = resources.files("pipeline.engine.tensorrt_llm").joinpath("versions.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(text)
    return table


@cache
def load_releases() -> dict[str, Release]:
    return {version: Release(version=version, **row) for version, row in _table()["releases"].items()}


@cache
def load_images() -> dict[str, Image]:
    """By release, the oldest first."""
    return {release: Image(release=release, **row) for release, row in _table()["images"].items()}


def find_image(reference: str) -> Image | None:
    """The row of a reference like nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3, in any registry, pinned by a
    digest or not; None where the table has none."""
    found = _TAG.search(reference)
    return load_images().get(found["release"]) if found else None


def list_fitting(version: str) -> list[str]:
    """The images' releases that carry this TensorRT-LLM."""
    return [image.release for image in load_images().values() if image.tensorrt_llm == version]


def judge(engine: str | None, image: str) -> Verdict:
    """Whether an engine that TensorRT-LLM `engine` built is loaded by the container `image`. None: one of VERSION, that
    is not built yet."""
    version, what = engine or VERSION, "this engine" if engine else "an engine to be built"
    releases = list_fitting(version)
    way_out = f"take an image of {', '.join(releases)} (-trtllm-python-py3)" if releases else "build the engine again"
    carried = find_image(image)
    if carried is None:
        known = ", ".join(load_images())
        return Verdict(
            fits=False, reason=f"{image}: of no release that is known to carry TensorRT-LLM ({known})", way_out=way_out
        )
    if carried.tensorrt_llm != version:
        return Verdict(
            fits=False,
            reason=f"{image} carries TensorRT-LLM {carried.tensorrt_llm}, and {what} is of {version}: an engine is "
            "loaded only by the release that built it",
            way_out=way_out,
        )
    return Verdict(
        fits=True, reason=f"{what} and {image} are both of TensorRT-LLM {version}, TensorRT {carried.tensorrt}"
    )
