from pathlib import Path

import pytest

from pipeline.errors import ConfigError, QuantizationError
from pipeline.evaluation.windows import cut_windows, read_tokens


def test_windows_are_whole_and_begin_with_bos() -> None:
    windows = cut_windows([*range(10, 20)], total=12, window=4, origin="text", first=[0])
    assert [w.tokens for w in windows] == [(0, 10, 11, 12), (0, 13, 14, 15), (0, 16, 17, 18)]


def test_too_little_text_is_refused_by_name() -> None:
    with pytest.raises(QuantizationError, match=r"notes\.txt: 3 tokens.*window of 16"):
        cut_windows([1, 2, 3], total=64, window=16, origin="notes.txt")


def test_fewer_tokens_than_a_window_are_not_the_texts_fault() -> None:
    with pytest.raises(QuantizationError, match=r"notes\.txt: 8 tokens are to be scored.*window of 16"):
        cut_windows(range(100), total=8, window=16, origin="notes.txt")


@pytest.mark.parametrize("name", ["a.jsonl", "a.NDJSON"])
def test_json_lines_are_no_held_out_text(llama_path: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "x"}\n' * 9)
    with pytest.raises(ConfigError, match=rf"{name}: held-out text is plain text") as caught:
        read_tokens(llama_path / "tokenizer.json", [tmp_path / name], setting="--text")
    assert "to a .txt file, and name that under --text" in caught.value.hint
