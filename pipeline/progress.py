"""How long work says where it is. Work reports to a `Progress` and never prints; who runs it chooses the reporter.

On a terminal there is one bar at a time (rich); elsewhere plain lines, one for every tenth or every few seconds.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console


class Progress(Protocol):
    """What long work reports to. Amounts are in `unit`: "B" for bytes, else a plural noun ("layers", "samples")."""

    def start(self, item: str, total: float, unit: str) -> None:
        """A new line or bar: `total` units of `item` are to be done. Ends the one before."""

    def advance(self, amount: float) -> None:
        """`amount` more units are done."""

    def note(self, message: str) -> None:
        """A line worth keeping: a warning, a choice made."""


class Reporter(Progress, Protocol):
    """A Progress that also shows which stage is at work; used by whoever runs several stages."""

    def begin(self, stage: str) -> None:
        """Items and notes belong to `stage` from now on."""

    def end(self, outcome: str) -> None:
        """The stage is over; `outcome` says how in a few words."""


class _Silent:
    def start(self, item: str, total: float, unit: str) -> None:
        pass

    def advance(self, amount: float) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def begin(self, stage: str) -> None:
        pass

    def end(self, outcome: str) -> None:
        pass


SILENT: Reporter = _Silent()


class PlainReporter:
    """Lines for logs: "convert: model.safetensors 40% 1.1/2.7 GB, 0.9 GB/s, 2 s left"."""

    def __init__(self, stream: TextIO, *, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._interval, self._clock = stream, interval_s, clock
        self._stage = ""
        self._item, self._total, self._unit = "", 0.0, ""
        self._done = self._shown = self._started = self._last = self._advanced = 0.0

    def begin(self, stage: str) -> None:
        self._close_item()
        self._stage = stage

    def end(self, outcome: str) -> None:
        self._close_item()
        self._print(outcome)
        self._stage = ""

    def start(self, item: str, total: float, unit: str) -> None:
        self._close_item()
        self._item, self._total, self._unit = item, total, unit
        self._done = self._shown = 0.0
        self._started = self._last = self._advanced = self._clock()

    def advance(self, amount: float) -> None:
        self._done += amount
        now = self._advanced = self._clock()
        if now - self._last < 0.2:  # a bound on the lines that fast work may print
            return
        tenth = bool(self._total) and int(10 * self._done / self._total) > int(10 * self._shown / self._total)
        if (tenth or now - self._last >= self._interval) and self._done < (self._total or float("inf")):
            self._show(now)

    def note(self, message: str) -> None:
        self._print(message)

    def _show(self, now: float) -> None:
        elapsed = max(now - self._started, 1e-9)
        rate = self._done / elapsed
        left = f", {format_seconds((self._total - self._done) / rate)} left" if rate and self._total else ""
        share = f"{100 * self._done / self._total:.0f}% " if self._total else ""
        self._print(
            f"{self._item} {share}{format_share(self._done, self._total, self._unit)}, "
            f"{format_rate(rate, self._unit)}{left}"
        )
        self._shown, self._last = self._done, now

    def _close_item(self) -> None:
        if self._item:
            # What was all done ended then, however long its stage went on after.
            ended = self._advanced if self._done >= self._total > 0 else self._clock()
            elapsed = max(ended - self._started, 1e-9)
            self._print(
                f"{self._item}: {format_amount(self._done, self._unit)} in {format_seconds(elapsed)}, "
                f"{format_rate(self._done / elapsed, self._unit)}"
            )
        self._item = ""

    def _print(self, text: str) -> None:
        prefix = f"{self._stage}: " if self._stage else ""
        print(prefix + text, file=self._stream, flush=True)


class TerminalReporter:
    """One live bar (stage, item, share, rate, time left) under the lines that stay: notes and outcomes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._bar: Any = None
        self._task: Any = None
        self._unit = ""
        self._started = self._done = 0.0

    def begin(self, stage: str) -> None:
        self._stop()
        self._stage = stage

    def end(self, outcome: str) -> None:
        self._stop()
        self._console.print(f"[bold]{self._stage:>9}[/bold]  {_escape(outcome)}", highlight=False)
        self._stage = ""

    def start(self, item: str, total: float, unit: str) -> None:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._stop()
        self._unit, self._started, self._done = unit, time.monotonic(), 0.0
        columns = (
            TextColumn(f"[bold]{self._stage:>9}[/bold]"),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[share]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
        )
        self._bar = Bar(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task(_escape(item), total=total or None, share=format_share(0, total, unit), rate="")
        self._bar.start()

    def advance(self, amount: float) -> None:
        if self._bar is None:
            return
        self._done += amount
        elapsed = max(time.monotonic() - self._started, 1e-9)
        total = self._bar.tasks[0].total or 0
        self._bar.update(
            self._task,
            completed=self._done,
            share=format_share(self._done, total, self._unit),
            rate=format_rate(self._done / elapsed, self._unit),
        )

    def note(self, message: str) -> None:
        self._console.print(f"{self._stage:>9}  [dim]{_escape(message)}[/dim]", highlight=False)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


def make_reporter(stream: TextIO | None = None) -> Reporter:
    """A bar where `stream` (default: stderr) is a terminal, plain lines where it is not."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return PlainReporter(stream)
    from rich.console import Console

    return TerminalReporter(Console(file=stream))


def format_amount(amount: float, unit: str) -> str:
    """1_500_000, "B" -> "1.50 MB"; 12, "layers" -> "12 layers". Decimal prefixes, as disks are sold."""
    if unit != "B":
        return f"{amount:g} {unit}"
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(amount) >= scale:
            return f"{amount / scale:.2f} {prefix}B"
    return f"{amount:.0f} B"


def format_share(done: float, total: float, unit: str) -> str:
    if not total:
        return format_amount(done, unit)
    return (
        f"{format_amount(done, unit)} of {format_amount(total, unit)}" if unit == "B" else f"{done:g}/{total:g} {unit}"
    )


def format_rate(rate: float, unit: str) -> str:
    if unit == "B":
        return f"{format_amount(rate, 'B')}/s"
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.2g} {unit}/s"


def format_seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
