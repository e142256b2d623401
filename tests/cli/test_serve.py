"""How `trtseek serve` ends and what it says; with a server: tests/serving/test_serve.py."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.cli import serve

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in ENDS]
    yield
    for number, handler in zip(ENDS, before, strict=True):
        signal.signal(number, handler)


class Supervisor:
    """Is sent signals while it runs."""

    def __init__(self, *signals: int) -> None:
        self.signals, self.stops, self.closed = signals, 0, False
        self.server = SimpleNamespace(addresses=SimpleNamespace(metrics_host="h", metrics=3))
        self.http, self.grpc = SimpleNamespace(host="h", port=1), SimpleNamespace(host="h", port=2)

    def start(self) -> None:
        pass

    def run(self) -> None:
        for number in self.signals:
            os.kill(os.getpid(), number)

    def stop(self) -> bool:
        self.stops += 1
        return self.stops > 1

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("number", ENDS)
def test_asked_to_end_it_ends(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor(number)
    serve._run(supervisor)  # type: ignore[arg-type]
    assert (supervisor.stops, supervisor.closed) == (1, True)
    output = capsys.readouterr()
    assert (output.out, output.err) == ("ready: gRPC at h:2, HTTP at h:1, metrics at h:3\n", "stopping\n")


def test_what_it_cannot_say_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where stderr goes to a file on a disk that is full by now."""
    supervisor = Supervisor(signal.SIGTERM)
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        serve._run(supervisor)  # type: ignore[arg-type]
        monkeypatch.undo()
        supervisor.signals = ()
    assert (supervisor.closed, supervisor.signals) == (True, ())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_twice_it_says_which_signal_cut_it_short(
    number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = Supervisor(signal.SIGTERM, number)
    with pytest.raises(SystemExit) as caught:
        serve._run(supervisor)  # type: ignore[arg-type]
    assert (caught.value.code, supervisor.closed) == (code, True)
    assert capsys.readouterr().err == "asked again: requests in flight are ended\n"


def test_the_log_of_a_package_is_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever `serve` is started, and by whatever path it is named."""
    package = tmp_path / "run/package"
    (package / "model_repository").mkdir(parents=True)
    (tmp_path / "link").symlink_to(package)
    for here, named in ((tmp_path, "run/package"), (package, "."), (tmp_path, "link")):
        monkeypatch.chdir(here)
        assert serve._find(named, (), False)[1] == tmp_path / "run/serve.log"
