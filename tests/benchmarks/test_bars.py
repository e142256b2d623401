"""Bars are held where what they compare was measured, and are said not to be where it was not."""

from __future__ import annotations

import pytest

from benchmarks.bars import hold_flat
from benchmarks.quantization import BARS, METHODS, hold_bars

GOOD = {
    "rtn": 1.0,
    "rtn_clip": 0.5,
    "awq": 0.36,
    "awq_zeros": 0.4,
    "gptq": 0.2,
    "awq_gptq": 0.16,
    "llm-compressor": 0.5,
}


def test_every_bar_is_held_where_all_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert hold_bars(GOOD)
    assert capsys.readouterr().out.count("met") == len(BARS) + 1
    for worse in ({"awq": 0.7}, {"awq_zeros": 0.7}, {"gptq": 0.95}, {"gptq": 0.55}):
        assert not hold_bars(GOOD | worse)
    poor = dict.fromkeys(METHODS, 0.5)
    assert not hold_bars(poor)
    assert "best at most 0.45: 0.500, MISSED" in capsys.readouterr().out


def test_what_was_not_run_is_not_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert hold_bars({"rtn": 1.0, "awq": 0.5})
    told = capsys.readouterr().out
    assert "awq at most 0.6: 0.500, met" in told
    assert "best at most 0.45: not measured (rtn_clip, gptq, awq_gptq)" in told
    assert "gptq at most 0.9: not measured (gptq)" in told
    assert not hold_bars({"rtn": 1.0, "awq": 0.7})
    assert hold_bars({"rtn": 1.0, "awq_gptq": 0.16})  # the best of all is no worse
    assert "best at most 0.45: 0.160, met" in capsys.readouterr().out


def test_one_size_shows_no_growth(capsys: pytest.CaptureFixture[str]) -> None:
    assert hold_flat({"awq": [100]}) and "awq: growth of peak memory not measured" in capsys.readouterr().out
    assert hold_flat({"awq": [100, 109], "gptq": [100]})
    assert not hold_flat({"awq": [100, 120], "gptq": [100, 100]})
