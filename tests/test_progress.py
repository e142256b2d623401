import io
import re

import pytest
from rich.console import Console

from pipeline.progress import (
    PlainReporter,
    TerminalReporter,
    format_amount,
    format_rate,
    format_seconds,
    format_share,
    make_reporter,
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_plain_lines_name_stage_item_share_rate_and_time_left():
    stream, clock = io.StringIO(), Clock()
    reporter = PlainReporter(stream, clock=clock)
    reporter.begin("convert")
    reporter.start("model.safetensors", 4e9, "B")
    for _ in range(4):
        clock.now += 1
        reporter.advance(1e9)
    reporter.note("clipped 3 weights")
    reporter.end("made in 4.0 s")
    reporter.note("after")
    assert stream.getvalue().splitlines() == [
        "convert: model.safetensors 25% 1.00 GB of 4.00 GB, 1.00 GB/s, 3.0 s left",
        "convert: model.safetensors 50% 2.00 GB of 4.00 GB, 1.00 GB/s, 2.0 s left",
        "convert: model.safetensors 75% 3.00 GB of 4.00 GB, 1.00 GB/s, 1.0 s left",
        "convert: clipped 3 weights",
        "convert: model.safetensors: 4.00 GB in 4.0 s, 1.00 GB/s",
        "convert: made in 4.0 s",
        "after",
    ]


def test_what_is_done_has_ended_however_long_its_stage_goes_on():
    stream, clock = io.StringIO(), Clock()
    reporter = PlainReporter(stream, clock=clock)
    reporter.start("SHA-256", 4e9, "B")
    clock.now += 2
    reporter.advance(4e9)
    clock.now += 60
    reporter.end("made")
    assert stream.getvalue().splitlines() == ["SHA-256: 4.00 GB in 2.0 s, 2.00 GB/s", "made"]


def test_plain_lines_are_few():
    stream, clock = io.StringIO(), Clock()
    reporter = PlainReporter(stream, clock=clock)
    reporter.start("fast", 10_000, "layers")
    for _ in range(10_000):  # a tenth of a millisecond each
        clock.now += 1e-4
        reporter.advance(1)
    assert len(stream.getvalue().splitlines()) <= 5
    stream.truncate(0)
    reporter.start("slow", 10_000, "layers")
    for _ in range(100):  # a second each, a hundredth of the whole together
        clock.now += 1
        reporter.advance(1)
    assert 18 <= len(stream.getvalue().splitlines()) <= 21


def test_terminal_shows_a_bar_and_keeps_notes():
    stream = io.StringIO()
    reporter = TerminalReporter(Console(file=stream, force_terminal=True, width=120, color_system=None))
    reporter.begin("quantize")
    reporter.start("layers [0]", 4, "layers")
    reporter.advance(3)
    reporter._bar.refresh()
    reporter.note("expert [7] was never routed to")
    reporter.end("made in 1 s")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert re.search(r"quantize layers \[0\] .*3/4 layers .*layers/s", text)
    assert "quantize  expert [7] was never routed to" in text
    assert text.rstrip().endswith("quantize  made in 1 s")


def test_plain_lines_where_the_stream_is_no_terminal():
    assert isinstance(make_reporter(io.StringIO()), PlainReporter)


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [(999, "B", "999 B"), (1500, "B", "1.50 kB"), (4.2e12, "B", "4.20 TB"), (3, "samples", "3 samples")],
)
def test_amounts(amount, unit, text):
    assert format_amount(amount, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (61, "61 s"), (150, "2 min"), (3600 * 2.5, "2 h 30 min")]
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_shares_and_rates():
    assert format_share(3, 0, "tokens") == "3 tokens"
    assert format_share(3, 4, "tokens") == "3/4 tokens"
    assert format_rate(2.5e8, "B") == "250.00 MB/s"
    assert format_rate(1234.5, "tokens") == "1,234 tokens/s"
