"""RawTensor to torch and numpy and back: the same bytes, shared where they can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.checkpoint.tensors import DTYPES, SAFETENSORS_DTYPE, RawTensor, TensorInfo


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_goes_there_and_back(name: str) -> None:
    itemsize, torch_name, _ = DTYPES[name]
    data = np.arange(6 * itemsize, dtype=np.uint8) % 2
    tensor = RawTensor(name, (2, 3), data).to_torch()
    assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, torch_name), (2, 3))
    back = RawTensor.from_torch(tensor)
    assert (back.dtype, back.shape) == (name, (2, 3))
    assert np.shares_memory(back.data, data)
    assert TensorInfo("x", name, (2, 3)).nbytes == data.nbytes
    assert SAFETENSORS_DTYPE[torch_name] == name


def test_views_that_are_not_contiguous_are_copied_in_row_order() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    raw = RawTensor.from_torch(tensor.T)
    assert raw.shape == (3, 2)
    assert raw.data.view(np.float32).tolist() == [0, 3, 1, 4, 2, 5]
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert RawTensor.from_numpy(array).data.view(np.float32).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("shape", [(), (0,), (0, 4)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    back = RawTensor.from_torch(tensor).to_torch()
    assert back.shape == tensor.shape and back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def test_read_only_bytes_give_a_tensor_without_a_warning() -> None:
    data = np.frombuffer(bytes(8), np.uint8)
    assert RawTensor("F32", (2,), data).to_torch().tolist() == [0.0, 0.0]
