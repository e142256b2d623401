"""Builds a network: the one place where an `INetworkDefinition` is filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.network.spec import NetworkSpec

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.tensors import RawTensor

__all__ = ["Network", "NetworkSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A filled network definition. It owns the memory that TensorRT's constants point to: keep it until the build or
    the last step is over."""

    trt: Any
    network: Any
    spec: NetworkSpec
    architecture: Architecture
    constants: dict[str, RawTensor]
