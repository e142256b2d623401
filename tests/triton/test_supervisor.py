"""What a supervisor does before there is a server to supervise, and at its end; the rest is tested with a package, end
to end."""

import os
import socket
import time
from types import SimpleNamespace

import pytest

from pipeline.triton import MODEL_REPO
from pipeline.triton.addresses import Addresses
from pipeline.triton.errors import ServerError
from pipeline.triton.installation import find_installation
from pipeline.triton.server import TritonServer
from pipeline.triton.supervisor import ECHO_S, SETTLE_S, SPARE_S, Patience, Supervisor


def test_a_taken_http_port_is_named_and_nothing_of_the_current_folder_is_removed(tmp_path, monkeypatch):
    (tmp_path / "precious").touch()
    monkeypatch.chdir(tmp_path)

    def make_server(addresses):
        return TritonServer(
            find_installation(), repository=tmp_path, backends=[], log=tmp_path / "log", addresses=addresses
        )

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        supervisor = Supervisor(
            make_server, addresses=Addresses(http=port), max_bytes=1000, patience=Patience(), say=lambda _: None
        )
        with pytest.raises(ServerError, match=f"127.0.0.1:{port} cannot be listened on"):
            supervisor.start()
        supervisor.close()
    assert os.listdir() == ["precious"]


class Server:
    """A server with requests in flight for the first `busy` looks at its metrics."""

    def __init__(self, addresses, busy):
        self.addresses, self.control, self.running = addresses, self, True
        self.busy, self.done = busy, []

    def metrics(self):
        if self.busy == "interrupted":
            raise KeyboardInterrupt
        if self.busy == "silent":
            raise ServerError("it does not answer")
        self.busy -= 1
        return f'nv_trt_llm_request_metrics{{model="m",request_type="active"}} {float(self.busy >= 0)}\n'

    def drain(self):
        self.done.append("drain")

    def stop(self, *, grace):
        self.done.append(grace)


def close(busy, *, grace, stops=1):
    """What the server was told, what was said, and the seconds it took."""
    said = []
    supervisor = Supervisor(
        lambda addresses: Server(addresses.resolve(), busy),
        addresses=Addresses(),
        max_bytes=1000,
        patience=Patience(grace=grace),
        say=said.append,
    )
    for gate in supervisor.gates:
        gate.start()
    assert [supervisor.stop() for _ in range(stops)] == [False, True][:stops]
    began = time.monotonic()
    try:
        supervisor.close()
    except KeyboardInterrupt:
        said.append("interrupted")
    return supervisor.server.done, said, time.monotonic() - began


def test_at_the_end_new_requests_are_refused_and_those_in_flight_waited_for():
    done, said, seconds = close(5, grace=30)
    assert (done, said) == (["drain", SPARE_S], [])
    assert seconds >= 0.4 + SETTLE_S


@pytest.mark.parametrize("busy", [10**6, "silent"])
def test_what_is_in_flight_after_the_grace_is_ended(busy):
    done, said, seconds = close(busy, grace=0.5)
    assert done == ["drain", 1.0]
    assert said == ["requests are still in flight after 0.5 s: they are ended"]
    assert seconds >= 0.5


def test_without_grace_an_idle_server_ends_in_silence():
    assert close(0, grace=0)[:2] == (["drain", SPARE_S], [])


def test_a_server_that_serves_no_more_is_not_waited_for():
    assert close(10**6, grace=30, stops=0)[:2] == (["drain", 1.0], [])


def test_asked_twice_before_it_ends_it_waits_for_no_request():
    assert close(10**6, grace=30, stops=2)[:2] == (["drain", 1.0], [])


def test_interrupted_it_ends_at_once():
    assert close("interrupted", grace=30)[:2] == (["drain", 0.0], ["interrupted"])


def test_who_asked_a_model_that_died_is_told_also_who_asks_while_it_goes(monkeypatch):
    """And who asked it over another model."""
    done = []
    server = Server(Addresses(), 0)
    server.unload = lambda model, deadline: done.append(f"unload {model}")
    server.load = lambda *models, deadline: done.append(f"load {', '.join(models)}")
    server.repository = MODEL_REPO
    supervisor = Supervisor(
        lambda _: server, addresses=Addresses(), max_bytes=1000, patience=Patience(), say=lambda _: None
    )
    monkeypatch.setattr(supervisor, "_confirm", lambda loaded: 1.0)
    for gate in supervisor.gates:
        monkeypatch.setattr(gate, "fail", lambda reason, models: done.append(sorted(models)))
    supervisor._reload({"tensorrt_llm": False})
    told = ["ensemble", "tensorrt_llm"]
    assert done == [told, told, "unload tensorrt_llm", told, told, "load tensorrt_llm"]


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ("terminate called after throwing an instance of 'boost::lock_exception'", "tritonserver ended with it"),
        ("", "loading again did not help: no answer"),
    ],
)
def test_a_server_that_ended_with_its_model_is_called_so_and_started_anew(monkeypatch, errors, said):
    server, told, started = Server(Addresses(), 0), [], []
    server.errors, server.stubs = lambda: errors, {}
    server.shortage = SimpleNamespace(describe=lambda: "")

    def refuse(models):
        raise ServerError("no answer")

    supervisor = Supervisor(
        lambda _: server, addresses=Addresses(), max_bytes=1000, patience=Patience(), say=told.append
    )
    monkeypatch.setattr(supervisor, "_reload", refuse)
    monkeypatch.setattr(supervisor, "_start_server", lambda: started.append(server.done[-1]))
    supervisor._repair("a process of m has ended")
    assert (told, started) == (["a process of m has ended", said], [1.0])


def test_who_hears_of_an_instance_that_lives_is_not_told(monkeypatch):
    """Of the others, those that hear nothing within a while."""
    done, silent = [], [2, 1, 1, 0]
    supervisor = Supervisor(
        lambda _: Server(Addresses(), 0),
        addresses=Addresses(),
        max_bytes=1000,
        patience=Patience(),
        say=lambda _: None,
    )
    supervisor.server.repository = MODEL_REPO
    began = time.monotonic()
    for gate in supervisor.gates:
        monkeypatch.setattr(gate, "count_silent", lambda models, since: silent.pop(0) if silent else 0)
        monkeypatch.setattr(
            gate, "fail", lambda reason, models, silent_since=0.0: done.append((sorted(models), silent_since))
        )
    supervisor._fail({"postprocessing": True})
    assert done[:2] == [([], 0.0)] * 2 and silent == []
    assert [models for models, _ in done[2:]] == [["ensemble", "postprocessing"]] * 2
    assert all(began + ECHO_S <= since <= time.monotonic() - 0.1 for _, since in done[2:])


def test_what_was_before_the_server_last_answered_explains_nothing_later(monkeypatch):
    """After each request that proves that it serves: that of a start or a repair, and each canary."""
    renewed, told = [], iter([None, "", "no answer", ""])
    server = Server(Addresses(), 0)
    server.stubs, server.shortage = {}, SimpleNamespace(renew=lambda: renewed.append(True))
    supervisor = Supervisor(
        lambda _: server, addresses=Addresses(), max_bytes=1000, patience=Patience(), say=lambda _: None
    )
    monkeypatch.setattr("pipeline.triton.supervisor.send_canary", lambda addresses, timeout: 1.0)
    assert supervisor._confirm() == 1.0
    assert len(renewed) == 1
    monkeypatch.setattr(supervisor._canaries, "look", lambda addresses, every, timeout: next(told))
    problem = "a canary request failed: no answer"
    for found, times in ((None, 1), (None, 2), (problem, 2), (None, 3)):
        assert (supervisor._find_problem(), len(renewed)) == (found, times)
