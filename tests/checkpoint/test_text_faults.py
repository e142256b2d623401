"""What is no text is told as such, by line and byte, by whoever reads it."""

import gzip
import io
import zipfile
from pathlib import Path

import pytest

from pipeline.checkpoint.text import encode_file
from pipeline.checkpoint.text_faults import BLOCK, find_fault
from pipeline.errors import ConfigError


def pack(text: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("text.txt", text)
    return archive.getvalue()


LONG = ("x" + "é" * 40 + "\n").encode() * 20_000  # of 82 bytes, so that blocks cut characters


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"\xff", r":1: is not UTF-8 \(byte 0: invalid start byte\)"),
        (LONG + b"caf\xe9 au lait", rf":20001: is not UTF-8 \(byte {len(LONG) + 3}: invalid continuation byte\)"),
        (LONG + b"caf\xc3", rf":20001: is not UTF-8 \(byte {len(LONG) + 3}: unexpected end of data\)"),
        ("def f(x): pass\n".encode("utf-16-le"), r":1: holds NUL bytes \(byte 1\): is it UTF-16\?"),
        (LONG + bytes(9), rf":20001: holds NUL bytes \(byte {len(LONG)}\)"),
        (b"x" * 20_000 + bytes(1), r":1: holds NUL bytes \(byte 20000\)"),  # in what a part is read on for
        ("def f(x): pass\n".encode("utf-16"), " is UTF-16: convert it to UTF-8"),
        (gzip.compress(b"text", mtime=0), r" is compressed \(gzip\): unpack it"),
        (pack(b"text"), r" is compressed \(zip\): unpack it"),
        (b"\x28\xb5\x2f\xfd\x24\x04\x21\x00\x00text", r" is compressed \(zstd\): unpack it"),
        (b"PAR1\x15\x04\x15\x20\x00", " is Parquet: convert it to JSON lines"),
    ],
)
def test_a_file_that_is_no_text_is_named_with_its_setting(
    llama_path: Path, tmp_path: Path, content: bytes, fault: str
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"text\.txt{fault}") as caught:
        encode_file(llama_path / "tokenizer.json", tmp_path / "text.txt", setting="stages.verify.heldout.files")
    assert "stages.verify.heldout.files" in str(caught.value)


def test_text_may_begin_as_other_files_do_and_be_cut_by_the_look(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"PAR1" + LONG)
    assert len(LONG) > BLOCK
    assert find_fault(tmp_path / "text.txt") is find_fault(tmp_path / "text.txt", 6) is None
