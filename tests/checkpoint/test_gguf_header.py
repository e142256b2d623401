"""A GGUF file's header, by the library's own writer; and what is no such header."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from pipeline.checkpoint.gguf_header import MAGIC, TYPES, read_gguf
from pipeline.errors import CheckpointError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_token_list([b"a", b"bc", "é".encode()])
    writer.add_array("numbers", [1, 2, 3, 4])
    writer.add_bool("flag", True)
    writer.add_tensor("wide", np.zeros((4, 8), np.float16))
    writer.add_tensor("packed", np.zeros((6, 36), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_the_library_wrote(file: Path) -> None:
    header = read_gguf(file)
    assert header.version == 3
    assert header.values == {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "tokenizer.ggml.tokens": 3,
        "numbers": 4,
        "flag": True,
    }
    told = [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in header.tensors]
    assert told == [("wide", "F16", (4, 8), 64), ("packed", "Q4_0", (6, 64), 6 * 36)]


def test_types_are_the_librarys() -> None:
    kinds = gguf.GGMLQuantizationType
    assert all((kinds(kind).name, *gguf.GGML_QUANT_SIZES[kinds(kind)]) == row for kind, row in TYPES.items())


def test_every_cut_is_noticed(file: Path) -> None:
    content = file.read_bytes()
    for size in range(0, len(content) - 32, 7):  # the last tensor may be padded
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"model\.gguf: ends (within its header|before its tensor)"):
            read_gguf(file)


def test_what_is_none(file: Path) -> None:
    content = file.read_bytes()
    for changed, problem in (
        (b"XXXX" + content[4:], "does not begin as a GGUF file does"),
        (MAGIC + b"\x07" + content[5:], "is GGUF of version 7; read are 2, 3"),
        (content[:24] + b"\xff" * 8 + content[32:], "a text of 18446744073709551615 bytes"),
        (content[:8] + b"\xff" * 16 + content[24:], "model.gguf: "),
        (content.replace(b"wide\x02\0\0\0", b"wide\x09\0\0\0"), "a tensor of 9 dimensions, 'wide'"),
    ):
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match=problem):
            read_gguf(file)
