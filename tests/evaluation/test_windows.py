import pytest

from pipeline.errors import QuantizationError
from pipeline.evaluation.windows import cut_windows


def test_windows_are_whole_and_begin_with_bos() -> None:
    windows = cut_windows([*range(10, 20)], total=12, window=4, origin="text", first=[0])
    assert [w.tokens for w in windows] == [(0, 10, 11, 12), (0, 13, 14, 15), (0, 16, 17, 18)]


def test_too_little_text_is_refused_by_name() -> None:
    with pytest.raises(QuantizationError, match=r"notes\.txt: 3 tokens.*window of 16"):
        cut_windows([1, 2, 3], total=64, window=16, origin="notes.txt")
