"""Tensors as a checkpoint stores them: a name, a safetensors type, a shape, and raw bytes that may be a file mapping.

Raw bytes rather than numpy or torch arrays, because neither reads every type without a copy: numpy has no bfloat16 or
FP8, and TensorRT wants a pointer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt
    import torch

# safetensors type -> (bytes per element, torch type, TensorRT type); configs spell types as torch does.
DTYPES: dict[str, tuple[int, str, str]] = {
    "F64": (8, "float64", ""),
    "F32": (4, "float32", "float32"),
    "F16": (2, "float16", "float16"),
    "BF16": (2, "bfloat16", "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn", "fp8"),
    "F8_E5M2": (1, "float8_e5m2", ""),
    "I64": (8, "int64", "int64"),
    "I32": (4, "int32", "int32"),
    "I16": (2, "int16", ""),
    "I8": (1, "int8", "int8"),
    "U8": (1, "uint8", "uint8"),
    "BOOL": (1, "bool", "bool"),
}
SAFETENSORS_DTYPE = {torch_name: name for name, (_, torch_name, _) in DTYPES.items()}
# The types a model computes in, which its weights and activations have: torch's name -> safetensors'.
MODEL_DTYPES = {name: SAFETENSORS_DTYPE[name] for name in ("float32", "float16", "bfloat16")}
MODEL_DTYPE_BYTES = {name: DTYPES[stored][0] for name, stored in MODEL_DTYPES.items()}


class TensorInfo(NamedTuple):
    """A tensor's name, safetensors type ("BF16", …) and shape, as a header states them.

    A tuple, since DeepSeek-V3 has 91,000 of them: a frozen dataclass takes twice as long to make.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's bytes: `data` is a contiguous one-dimensional uint8 array, row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def to_torch(self) -> torch.Tensor:
        """The same bytes as a torch tensor. No copy: a tensor over a file mapping must not be written to."""
        import warnings

        import torch

        dtype = getattr(torch, DTYPES[self.dtype][1])
        if not self.data.size:  # torch does not view an empty tensor as another type
            return torch.empty(self.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            flat = torch.from_numpy(self.data)
        return flat.view(dtype).reshape(self.shape)

    @staticmethod
    def from_torch(tensor: torch.Tensor) -> RawTensor:
        """Shares memory with `tensor` where it is contiguous on the CPU, copies otherwise."""
        import torch

        flat = tensor.detach().cpu().contiguous().reshape(-1)
        flat = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
        name = str(tensor.dtype).removeprefix("torch.")
        return RawTensor(SAFETENSORS_DTYPE[name], tuple(tensor.shape), flat.numpy())

    @staticmethod
    def from_numpy(array: npt.NDArray[np.generic]) -> RawTensor:
        import numpy as np

        shape = tuple(array.shape)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return RawTensor(SAFETENSORS_DTYPE[str(array.dtype)], shape, data)


class TensorSource(Protocol):
    """What readers of a checkpoint need: the headers, and one tensor's bytes at a time."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> RawTensor: ...


def release_layer(source: TensorSource, layer: int) -> None:
    """Lets go of the pages of mapped files that a decoder layer's weights were read from: they would add up, layer by
    layer. Of an engine checkpoint; nothing where the source is not over files."""
    release = getattr(source, "release", None)
    if release is None:
        return
    for name in source.tensors:
        if name.startswith(f"transformer.layers.{layer}."):
            release(name)
