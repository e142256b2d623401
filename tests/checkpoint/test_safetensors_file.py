"""Our reader and writer against the safetensors library, and headers that lie."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.safetensors_file import CHUNK, SafetensorsFile, SafetensorsWriter, write_safetensors
from pipeline.checkpoint.tensors import DTYPES, RawTensor, TensorInfo
from pipeline.digest import digest_file
from pipeline.errors import CheckpointError

TYPES = [getattr(torch, torch_name) for _, torch_name, _ in DTYPES.values()]


def every_type() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        str(dtype): torch.randint(0, 256, (6 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .reshape(2, 3)
        for dtype in TYPES
        if dtype != torch.bool
    }
    return tensors | {
        "bool": torch.tensor([[True, False, True]]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "ünïcode": torch.ones(1),
    }


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def infos_of(tensors: dict[str, torch.Tensor]) -> list[TensorInfo]:
    raw = {name: RawTensor.from_torch(t) for name, t in tensors.items()}
    return [TensorInfo(name, r.dtype, r.shape) for name, r in raw.items()]


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = every_type()
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.metadata == {"format": "pt"}
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bytes(file.read(name).to_torch(), tensor), name


def test_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors, path = every_type(), tmp_path / "a.safetensors"
    raw = (RawTensor.from_torch(t) for t in tensors.values())
    write_safetensors(path, infos_of(tensors), raw, metadata={"made": "here"})
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bytes(loaded[name], tensor), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"made": "here"}


def test_reading_maps_and_allocates_nothing(tmp_path: Path) -> None:
    import tracemalloc

    save_file({"a": torch.ones(4 << 20)}, tmp_path / "a.safetensors")
    tracemalloc.start()
    data = SafetensorsFile(tmp_path / "a.safetensors").read("a").data
    total = int(data[: 1 << 20].view(np.float32).sum())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 1 << 18
    assert not data.flags.writeable
    assert peak < 200_000


def test_released_tensor_reads_again(tmp_path: Path) -> None:
    tensor = torch.arange(1 << 20)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    file.release("a")
    data = file.read("a")
    assert torch.equal(data.to_torch(), tensor)
    file.release("a")
    file.release("a", 100, 9000)
    assert torch.equal(data.to_torch(), tensor)


def test_misaligned_tensor_is_copied(tmp_path: Path) -> None:
    infos = [TensorInfo("odd", "I8", (3,)), TensorInfo("f", "F32", (2,))]
    values = [np.array([1, 2, 3], np.int8), np.array([1.5, -2.0], np.float32)]
    write_safetensors(tmp_path / "a.safetensors", infos, (RawTensor.from_numpy(v) for v in values))
    read = SafetensorsFile(tmp_path / "a.safetensors").read("f")
    assert read.data.ctypes.data % 4 == 0
    assert read.to_torch().tolist() == [1.5, -2.0]


@pytest.mark.parametrize("wrong", ["dtype", "shape", "few", "many"])
def test_writer_refuses_what_was_not_declared(wrong: str, tmp_path: Path) -> None:
    info = TensorInfo("a", "F32", (2, 2))
    tensors = {
        "dtype": [RawTensor.from_numpy(np.zeros((2, 2), np.int32))],
        "shape": [RawTensor.from_numpy(np.zeros((4,), np.float32))],
        "few": [],
        "many": [RawTensor.from_numpy(np.zeros((2, 2), np.float32))] * 2,
    }[wrong]
    with pytest.raises(ValueError, match=r"declared|shorter|longer"):
        write_safetensors(tmp_path / "a.safetensors", [info], tensors)
    assert not (tmp_path / "a.safetensors").exists()


def test_writer_refuses_short_streams(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="12 bytes written, 16 declared"),
        SafetensorsWriter(tmp_path / "a.safetensors", [TensorInfo("a", "F32", (4,))]) as writer,
    ):
        writer.write(np.zeros(3, np.float32))
    assert not (tmp_path / "a.safetensors").exists()


def entry(shape: Any = (2,), begin: Any = 0, end: Any = 8, dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def file_of(header: Any, data: bytes = b"\0" * 8, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


# Executable bad inputs, after the `attacks/` folder of the safetensors repository. Each with what the message must say.
ATTACKS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "too few"),
    "seven bytes": (b"\0" * 7, "too few"),
    "header longer than the file": (file_of({}, b"", length=1000), "claims 1000 bytes"),
    "header of 2^63 bytes": (file_of({}, b"", length=1 << 63), "claims"),
    "header over the limit": (file_of({}, b"", length=100_000_001), "claims"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not valid JSON"),
    "not JSON": (file_of(b"{'a': 1}"), "not valid JSON"),
    "a list": (file_of([]), "not a JSON object"),
    "nested": (file_of(b"[" * 100_000), "nested too deeply"),
    "duplicate name": (file_of(b'{"a": 1, "a": 1}'), "'a' appears twice"),
    "NaN": (file_of(b'{"a": NaN}'), "NaN is not JSON"),
    "entry is a number": (file_of({"a": 1}), "entry for a"),
    "entry lacks dtype": (file_of({"a": {"shape": [2], "data_offsets": [0, 8]}}), "entry for a"),
    "entry has more": (file_of({"a": entry(strides=[1])}), "entry for a"),
    "unknown dtype": (file_of({"a": entry(dtype="F4")}), "a has type 'F4'"),
    "dtype is a list": (file_of({"a": entry(dtype=["F32"])}), "a has type"),
    "negative size": (file_of({"a": entry((-2,))}), "a has shape"),
    "size is a float": (file_of({"a": entry((2.0,))}), "a has shape"),
    "size is true": (file_of({"a": entry((True, 2))}), "a has shape"),
    "shape is a string": (file_of({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}), "a has shape"),
    "negative offset": (file_of({"a": entry(begin=-8, end=0)}), "a has data_offsets"),
    "offsets reversed": (file_of({"a": entry(begin=8, end=0)}), "span -8"),
    "three offsets": (file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}), "a has data_offsets"),
    "shape does not fit offsets": (file_of({"a": entry((3,))}), "takes 12 bytes; its data_offsets span 8"),
    "overflowing shape": (file_of({"a": entry((1 << 40, 1 << 40, 0), 0, 0)}, b""), "too many elements"),
    "beyond the file": (file_of({"a": entry((4,), 0, 16)}), "take 16 bytes, 8 follow"),
    "truncated": (file_of({"a": entry()}, b"\0" * 7), "take 8 bytes, 7 follow"),
    "trailing bytes": (file_of({"a": entry()}, b"\0" * 9), "take 8 bytes, 9 follow"),
    "overlap": (file_of({"a": entry(), "b": entry((1,), 4, 8)}), "b overlaps a"),
    "hole": (file_of({"a": entry((1,), 0, 4), "b": entry((1,), 8, 12)}, b"\0" * 12), "b leaves 4 bytes unused after a"),
    "hole at the start": (file_of({"a": entry((1,), 4, 8)}), "a leaves 4 bytes unused after the start"),
    "metadata is a list": (file_of({"__metadata__": [], "a": entry()}), "__metadata__"),
    "metadata holds numbers": (file_of({"__metadata__": {"x": 1}, "a": entry()}), "__metadata__"),
    "escape codes in a name": (file_of({"\x1b[31mred": entry()}), "no text"),
    "half a surrogate": (file_of(b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'), "no text"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_bad_file_is_refused(name: str, tmp_path: Path) -> None:
    content, expected = ATTACKS[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert str(path) in caught.value.message
    assert expected in caught.value.message
    assert caught.value.hint


def test_a_git_lfs_pointer_is_told_how_to_become_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pointer.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 7\n")
    with pytest.raises(CheckpointError, match=r"pointer\.safetensors: is a Git LFS pointer") as caught:
        SafetensorsFile(path)
    assert "git lfs pull" in caught.value.hint


def test_pipe_and_missing_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        SafetensorsFile(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(tmp_path / "none.safetensors")


VALID = file_of({"a": entry(), "b": entry((3, 1), 8, 14, "BF16"), "__metadata__": {"k": "v"}}, bytes(range(14)))


@given(position=st.integers(0, len(VALID) - 1), byte=st.integers(0, 255), cut=st.integers(0, 3))
def test_damaged_bytes_never_crash(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int, cut: int
) -> None:
    """One byte changed and a few cut off: refused, or read as what the library reads."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    content = bytearray(VALID)
    content[position] = byte
    path.write_bytes(content[: len(content) - cut])
    try:
        ours = SafetensorsFile(path)
    except CheckpointError:
        return
    try:
        theirs = load_file(path)
    except SafetensorError as error:
        pytest.fail(f"accepted what the library refuses: {error}")
    assert ours.tensors.keys() == theirs.keys()
    for name in theirs:
        assert same_bytes(ours.read(name).to_torch(), theirs[name])


@pytest.mark.parametrize("size", [0, 1, 3 * CHUNK + 5])
def test_the_digest_is_the_files(tmp_path, size):
    info = TensorInfo("x", "U8", (size,))
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    with SafetensorsWriter(tmp_path / "a", [info], metadata={"format": "pt"}) as writer:
        for start in range(0, size, CHUNK):
            writer.write(data[start : start + CHUNK])
    assert writer.digest == digest_file(tmp_path / "a", cached=False)
