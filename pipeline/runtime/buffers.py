"""A profile's inputs at fixed addresses: one piece of host memory, one of device memory, one copy per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from pipeline.network import inputs as ports
from pipeline.runtime.device import Device

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64  # int32 values: the 256 bytes of which TensorRT wants addresses to be multiples


class StepBuffers:
    """Room for the largest step of a profile. sizes: by the names of network/inputs.py."""

    def __init__(self, device: Device, sizes: Mapping[str, int], what: str) -> None:
        self._device = device
        self._room: dict[str, tuple[int, int]] = {}  # first value, number of values
        end = 0
        for port in ports.STEP_INPUTS:
            count = math.prod(port.resolve(sizes))
            self._room[port.name] = (end, count)
            end += -(-count // ALIGNMENT) * ALIGNMENT
        self._host = device.allocate_host(end)
        self._values = self._host.numpy()
        self._target = device.allocate((end,), "int32", what)
        self._wait: Callable[[], None] = lambda: None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Each input's place on the device."""
        return {name: self._target[first : first + count] for name, (first, count) in self._room.items()}

    def upload(self, inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, tuple[int, ...]]:
        """Starts the copy of a step's inputs → their shapes. Waits for the copy before, which reads the same memory."""
        self._wait()
        for name, (first, _) in self._room.items():
            self._values[first : first + inputs[name].size] = inputs[name].reshape(-1)
        self._wait = self._device.upload(self._target, self._host)
        return {name: inputs[name].shape for name in self._room}
