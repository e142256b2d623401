import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.checkpoint.text import CHUNK_CHARACTERS, encode_file, encode_text
from pipeline.errors import CheckpointError, ConfigError


def test_files_encode_as_transformers_does(llama_path: Path, tmp_path: Path) -> None:
    text = "naïve — 数学\n" * (CHUNK_CHARACTERS // 8)  # more than one chunk
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    expected = AutoTokenizer.from_pretrained(llama_path).encode(text, add_special_tokens=False)
    assert encode_file(llama_path / "tokenizer.json", tmp_path / "text.txt", setting="x").tolist() == expected
    assert encode_text(llama_path / "tokenizer.json", text) == expected


PEAK = """
import sys
from pathlib import Path
from benchmarks.peak import read_peak
from pipeline.checkpoint.text import encode_file
tokenizer, text, times = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
print(sum(len(encode_file(tokenizer, text, setting="x")) for _ in range(times)), read_peak())
"""


def peak(text: Path, times: int = 1) -> tuple[int, int]:
    """Tokens of `text`, tokenized `times` times, and the peak of a process that does nothing else."""
    command = [sys.executable, "-c", PEAK, "checkpoints/deepseek-v2-tiny/tokenizer.json", str(text), str(times)]
    tokens, resident = map(int, subprocess.run(command, capture_output=True, check=True).stdout.split())
    return tokens, resident


def test_memory_is_of_the_tokens(tmp_path: Path) -> None:
    """Sixteen times the text costs what its tokens take, and neither a Python number nor the library's record of
    each."""
    text = Path("checkpoints/text/calibration.txt")
    (tmp_path / "long.txt").write_text(text.read_text(encoding="utf-8") * 16, encoding="utf-8")
    (few, small), (many, large) = peak(text), peak(tmp_path / "long.txt")
    assert many > 15 * few
    assert large - small < 8 * (many - few)


def test_a_line_may_be_the_whole_file(tmp_path: Path) -> None:
    """Cut between words: the same tokens, in the memory that lines of ordinary length take."""
    text = " ".join(Path("checkpoints/text/calibration.txt").read_text(encoding="utf-8").split())
    (tmp_path / "short.txt").write_text(text)
    (tmp_path / "long.txt").write_text(" ".join([text] * 12))
    tokenizer = Path("checkpoints/deepseek-v2-tiny/tokenizer.json")
    assert len(text) > 4 * CHUNK_CHARACTERS
    assert encode_file(tokenizer, tmp_path / "short.txt", setting="x").tolist() == encode_text(tokenizer, text)
    (few, small), (many, large) = peak(tmp_path / "short.txt"), peak(tmp_path / "long.txt")
    assert large - small < 12 * (many - few) + 16_000_000


def test_a_byte_order_mark_is_no_text(llama_path: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text", encoding="utf-8-sig")
    expected = encode_text(llama_path / "tokenizer.json", "text")
    assert encode_file(llama_path / "tokenizer.json", tmp_path / "text.txt", setting="x").tolist() == expected


def test_words_are_not_kept_for_a_tokenizer_that_is_gone() -> None:
    """The library would keep 4 MB each time."""
    text = Path("checkpoints/text/calibration.txt")
    (_, once), (_, often) = peak(text), peak(text, 6)
    assert often - once < 10_000_000


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        encode_text(tmp_path / "tokenizer.json", "text")


def test_missing_text_is_named(llama_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.txt: No such file or directory\n"):
        encode_file(llama_path / "tokenizer.json", tmp_path / "missing.txt", setting="x")
