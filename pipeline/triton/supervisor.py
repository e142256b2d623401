"""Keeps a server serving: ready only once a request was answered, repaired when a model's process dies, drained at the
end.

Triton does not restart a Python model's process, and says that it is ready all the same. So its processes are watched,
and from time to time a request is sent through everything: the canary.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from model_repo.trtseek_text import DRAINING
from pipeline.errors import TrtseekError
from pipeline.progress import format_seconds
from pipeline.triton.addresses import LOOPBACK, Addresses
from pipeline.triton.canary import ANSWER_S, LOAD_S, Canaries, send_canary
from pipeline.triton.errors import ServerError
from pipeline.triton.gate import Gate
from pipeline.triton.grpc_gate import GrpcGate
from pipeline.triton.http_gate import HttpGate
from pipeline.triton.instances import Instances, find_askers
from pipeline.triton.model_config import EXECUTOR
from pipeline.triton.package import read_configs
from pipeline.triton.server import ABORTED, TritonServer
from pipeline.triton.shortage import ADVICE

WATCH_S = 0.5
# Of a model of which another instance lives: what came from the dead one is through after the first, and who has heard
# nothing more after the second is taken for one that it owed an answer. Which instance has a request, Triton does not
# say: one that the living one owes, and would answer all at once or much later, is ended with them, and told so.
ECHO_S, LISTEN_S = 0.5, 5.0
# What has been in flight is seen to be over when nothing is for so long: a model publishes its metrics twice a second.
SETTLE_S = 1.0
_REQUESTS = re.compile(r"^nv_trt_llm_request_metrics\{([^}]*)\} (\S+)", re.MULTILINE)
# Until a server that has answered everything is killed: its models take two seconds to end, of which Triton 24.10 waits
# for ever for one that owes a request which it has lost count of, as that of a process that died.
SPARE_S = 5.0
# More repairs than this within the hour: something is wrong that a repair does not cure.
MAX_REPAIRS, REPAIR_WINDOW_S = 6, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds. start: until all models are loaded. canary: for one small request. every: between two of them.
    grace: for requests in flight at the end."""

    start: float = LOAD_S
    canary: float = ANSWER_S
    every: float = 60.0
    grace: float = 30.0


class Supervisor:
    """`make_server` gives a new server, not started, each time it is called; `say` is told what happens."""

    def __init__(
        self,
        make_server: Callable[[Addresses], TritonServer],
        *,
        addresses: Addresses,
        max_bytes: int,
        patience: Patience,
        say: Callable[[str], None],
    ) -> None:
        """`addresses`: what clients use. HTTP and gRPC go through gates, Triton's own ports are others. `max_bytes`: of
        one request."""
        self.patience, self._say = patience, say
        self._make_server = make_server
        inner = Addresses(host=LOOPBACK, metrics_host=addresses.metrics_host, metrics=addresses.metrics)
        self.server = make_server(inner)
        self.ready = False
        self._stopping, self._hurried = threading.Event(), False
        self._instances = Instances()
        self._repairs: deque[float] = deque()
        self._canaries = Canaries()
        options: Any = {"host": addresses.host, "max_bytes": max_bytes, "is_ready": lambda: self.ready}
        at = self.server.addresses
        self.http = HttpGate(f"http://{LOOPBACK}:{at.http}", port=addresses.http, **options)
        self.grpc = GrpcGate(f"{LOOPBACK}:{at.grpc}", port=addresses.grpc, **options)

    def start(self) -> None:
        """Returns once a request was answered. Raises ServerError."""
        for gate in self.gates:
            gate.start()
        self._start_server()

    def run(self) -> None:
        """Watches until `stop`, and repairs. Raises ServerError when that does not help any more."""
        while not self._stopping.wait(WATCH_S):
            if problem := self._find_problem():
                self.ready = False
                self._repair(problem)

    @property
    def gates(self) -> tuple[Gate, ...]:
        return self.http, self.grpc

    def stop(self) -> bool:
        """Makes `run` return; asked twice, `close` waits for no request. Whether it was. May be called from a signal
        handler."""
        self._hurried = self._stopping.is_set()
        self._stopping.set()
        return self._hurried

    def close(self) -> None:
        """Refuses new requests, lets those in flight end where it was told to stop, and ends the server; interrupted,
        at once."""
        self.ready = False
        for gate in self.gates:
            gate.draining = True
        grace = 0.0
        try:
            self.server.drain()
            over = self._stopping.is_set() and not self._hurried and self._drain()
            for gate in self.gates:
                gate.close()
            grace = SPARE_S if over else 1.0
        finally:
            for gate in self.gates:
                gate.fail(DRAINING)
            self.server.stop(grace=grace)

    def _drain(self) -> bool:
        """Whether nothing was in flight any more within the grace."""
        idle_since = began = time.monotonic()
        while self.server.running and (now := time.monotonic()) - idle_since < SETTLE_S:
            if self._busy():
                idle_since = now
                if now - began >= self.patience.grace:
                    grace = format_seconds(self.patience.grace)
                    self._say(f"requests are still in flight after {grace}: they are ended")
                    return False
            time.sleep(0.1)
        return True

    def _start_server(self) -> None:
        began = time.monotonic()
        self.server.start(self.patience.start)
        loaded = time.monotonic() - began
        try:
            seconds = self._confirm()
        except TrtseekError as error:
            raise ServerError(
                f"the models are loaded, and a first request failed: {error.message}",
                hint=f"the log: {self.server.log}",
            ) from error
        self._say(f"models loaded in {format_seconds(loaded)}, a first request answered in {format_seconds(seconds)}")

    def _find_problem(self) -> str | None:
        if not self.server.running:
            return "tritonserver has ended"
        if lost := self._instances.find_lost(self.server.stubs):
            return f"a process of {', '.join(lost)} has ended"
        error = self._canaries.look(self.server.addresses, every=self.patience.every, timeout=self.patience.canary)
        if error:
            return f"a canary request failed: {error}"
        if error is not None:
            self.server.shortage.renew()
        return None

    def _confirm(self, loaded: Iterable[str] = ()) -> float:
        """Ready, once a request is answered: the seconds that took. `loaded`: again, in the place of what they were."""
        seconds = send_canary(self.server.addresses, self.patience.canary)
        self._instances, self._canaries = self._instances.without(loaded, self.server.stubs), Canaries()
        self.server.shortage.renew()
        self.ready = True
        return seconds

    def _repair(self, problem: str) -> None:
        """Loads the dead model again, or starts the server anew; after that a canary decides."""
        now = time.monotonic()
        self._repairs.append(now)
        while self._repairs and self._repairs[0] < now - REPAIR_WINDOW_S:
            self._repairs.popleft()
        if len(self._repairs) > MAX_REPAIRS:
            raise ServerError(
                f"{problem}, after {MAX_REPAIRS} repairs within the hour\n{self.server.errors()}".rstrip(),
                hint=f"the log: {self.server.log}",
            )
        cause = self.server.shortage.describe()
        self._say(f"{problem} ({cause}: {ADVICE})" if cause else problem)
        if self.server.running:
            try:
                self._reload(self._instances.find_lost(self.server.stubs) or {EXECUTOR: False})
                return
            except TrtseekError as error:
                ended = ABORTED in self.server.errors()
                self._say("tritonserver ended with it" if ended else f"loading again did not help: {error.message}")
        self.server.stop(grace=1.0)
        self.server = self._make_server(self.server.addresses)
        self._start_server()

    def _reload(self, models: Mapping[str, bool]) -> None:
        """Each, and whether an instance of it lives: that goes on with its requests while the model is loaded anew."""
        self._fail(models)
        for model in models:
            self.server.control.unload(model, deadline=self.patience.canary)
        self._fail(models)  # who asked again meanwhile
        self.server.load(*models, deadline=self.patience.start)
        seconds = self._confirm(models)
        self._say(f"{', '.join(models)} loaded again, a request answered in {format_seconds(seconds)}")

    def _fail(self, models: Mapping[str, bool]) -> None:
        """Ends the calls that get no answer any more."""
        reason = f"{', '.join(models)} failed, and is loaded again: ask again"
        configs = read_configs(self.server.repository)
        dead = find_askers({model for model, lives in models.items() if not lives}, configs)
        for gate in self.gates:
            gate.fail(reason, dead)
        if hurt := find_askers({model for model, lives in models.items() if lives}, configs):
            self._stopping.wait(ECHO_S)
            since = time.monotonic()
            while any(gate.count_silent(hurt, since) for gate in self.gates) and time.monotonic() - since < LISTEN_S:
                if self._stopping.wait(0.1):
                    break
            for gate in self.gates:
                gate.fail(reason, hurt, silent_since=since)

    def _busy(self) -> bool:
        try:
            text = self.server.control.metrics()
        except ServerError:
            return True
        counts = {labels: float(value) for labels, value in _REQUESTS.findall(text)}
        waiting = sum(count for labels, count in counts.items() if '"active"' in labels or '"waiting"' in labels)
        return waiting > 0 or any(gate.in_flight for gate in self.gates)
