"""A running tritonserver: its command line, its start with a deadline, its models, its end without remains.

It loads its models at the start, all at once, and goes on where one cannot be loaded, so that it can be asked why. It
runs in explicit mode, so that a model whose process died can be loaded again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.triton import keeper
from pipeline.triton.errors import ServerError
from pipeline.triton.installation import Installation, mirror
from pipeline.triton.processes import PREFIX, find_stubs, is_alive, remove_stale_memory
from pipeline.triton.repository import ARTIFACTS

LOOPBACK = "127.0.0.1"
# Loading and unloading run code of the caller's choice, and shared memory and traces touch the host's files: only
# who started the server may, by a header that nobody else knows.
GUARDED_APIS = ("model-repository", "shared-memory", "trace", "logging")
GUARD = "trtseek-key"
STUB_S = 300
# Triton's exit time-out counts requests in flight and the end of its models' processes together.
UNLOAD_S = 10.0
# What of the log explains a failure: Triton's own error lines, and a Python model's last words.
_ERROR_LINE = re.compile(r"E\d{4} |error: |\w*Error: |\w*Exception: |terminate")
# Triton without a GPU says these as errors, and means nothing by them.
_NOISE = re.compile(r"CUDA driver version|NVML|DCGM|Cuda[A-Z]|unable to create stream|pinned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a server listens. A port of 0 is replaced by a free one."""

    host: str = LOOPBACK
    http_host: str = LOOPBACK
    http: int = 0
    grpc: int = 0
    metrics: int = 0

    def resolve(self) -> Addresses:
        """With free ports in the place of 0."""
        with contextlib.ExitStack() as held:
            ports = {name: getattr(self, name) or _free_port(held) for name in ("http", "grpc", "metrics")}
        return Addresses(host=self.host, http_host=self.http_host, **ports)


class TritonServer:
    """One tritonserver over one model repository. A context manager: leaving it ends the server."""

    def __init__(
        self,
        installation: Installation,
        *,
        repository: Path,
        backends: Sequence[Path],
        log: Path,
        addresses: Addresses | None = None,
        grace: float = 30.0,
        options: Sequence[str] = (),
    ) -> None:
        """`backends`: folders of Python-based backends. `grace`: seconds that requests in flight have at the end.
        `options`: more of tritonserver's own."""
        self.installation, self.repository, self.backends = installation, repository, tuple(backends)
        self.log, self.grace, self.options = log, grace, tuple(options)
        self.addresses = (addresses or Addresses()).resolve()
        self.key = secrets.token_hex(16)
        self.prefix = f"{PREFIX}_{os.getpid()}_{secrets.token_hex(4)}_"
        self.pid: int | None = None
        self._keeper: subprocess.Popen[str] | None = None
        self._folder = Path()

    def start(self, deadline: float) -> None:
        """Starts it and waits until every model is loaded. Raises ServerError with the reasons where one cannot be, or
        not within `deadline` seconds: a model's process that cannot start makes Triton wait for ever."""
        remove_stale_memory()
        self._folder = Path(tempfile.mkdtemp(prefix="trtseek-triton-"))
        try:
            self.installation.link_backends(self._folder / "backends", *self.backends)
            mirror(self.repository, self._models)
            if (artifacts := self.repository.parent / ARTIFACTS).is_dir():  # which the models name by relative paths
                (self._models.parent / ARTIFACTS).symlink_to(artifacts.resolve(), target_is_directory=True)
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._launch()
            self._wait_until_live(deadline)
            self._check_models()
        except BaseException:
            self.stop(grace=0)
            raise

    def stop(self, *, grace: float | None = None) -> int | None:
        """Ends it: new requests are refused, those in flight have `self.grace` seconds; or the whole end has `grace`.

        Returns the exit status, 0 for a clean end; None where it did not run."""
        status = None
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            assert keeper.stdin is not None and keeper.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.write(f"stop {self._patience if grace is None else grace}\n")
                keeper.stdin.close()
            answer = keeper.stdout.read().strip()
            keeper.stdout.close()
            keeper.wait()
            status = int(answer) if answer else None
        shutil.rmtree(self._folder, ignore_errors=True)
        self.pid = None
        return status

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the process is there. It says nothing about the models: ask one."""
        return self._keeper is not None and self._keeper.poll() is None and is_alive(self.pid)

    @property
    def stubs(self) -> dict[int, str]:
        """The Python models' processes, by process id: the name that the stub was started with."""
        return {} if self.pid is None else find_stubs(self.pid)

    def load(self, *models: str, deadline: float) -> None:
        """Loads models, all at once. Raises ServerError with the reason of the first that cannot be."""
        self._control("load", models, deadline)

    def unload(self, *models: str, deadline: float) -> None:
        self._control("unload", models, deadline)

    def metrics(self) -> str:
        """Triton's metrics in Prometheus' text format. Raises ServerError."""
        return self._fetch(f"http://{self.reach(self.addresses.host)}:{self.addresses.metrics}/metrics")

    def errors(self, lines: int = 6) -> str:
        """The log's last errors, for messages."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        found = [
            line for line in text.splitlines() if re.match(r"E\d{4} |error: |\w*Error: |\w*Exception: |terminate", line)
        ]
        return "\n".join(line.strip() for line in found[-lines:])

    def _launch(self) -> None:
        job = {
            "command": self.command(),
            "log": str(self.log),
            "grace": self._patience,
            "shared_memory_prefix": self.prefix,
            "folder": str(self._folder),
        }
        self._keeper = subprocess.Popen(
            [sys.executable, keeper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.installation.environment(),
            start_new_session=True,
        )
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.stdin.write(json.dumps(job) + "\n")
        self._keeper.stdin.flush()
        answer = self._keeper.stdout.readline().strip()
        if not answer.isdigit():
            raise ServerError(f"{self.installation.binary} cannot be run: {answer.removeprefix('error ')}")
        self.pid = int(answer)

    def command(self) -> list[str]:
        """The command line. Its defaults would listen on every interface, and wait 30 s at most for a model's stub."""
        addresses = self.addresses
        guarded = ",".join(GUARDED_APIS)
        command = [
            str(self.installation.binary),
            f"--model-repository={self._models}",
            f"--backend-directory={self._folder / 'backends'}",
            "--model-control-mode=explicit",
            "--load-model=*",
            "--disable-auto-complete-config",  # it starts every stub twice
            "--exit-on-error=false",
            f"--exit-timeout-secs={round(self.grace + UNLOAD_S)}",
            f"--http-address={addresses.http_host}",
            f"--grpc-address={addresses.host}",
            f"--metrics-address={addresses.host}",
            f"--http-port={addresses.http}",
            f"--grpc-port={addresses.grpc}",
            f"--metrics-port={addresses.metrics}",
            "--metrics-interval-ms=1000",
            f"--backend-config=python,stub-timeout-seconds={STUB_S}",
            f"--backend-config=python,shm-region-prefix-name={self.prefix}",
            f"--http-restricted-api={guarded}:{GUARD}={self.key}",
            f"--grpc-restricted-protocol={guarded}:{GUARD}={self.key}",
            *self.options,
        ]
        if self.installation.caches is not None:
            command.append(f"--cache-directory={self.installation.caches}")
        return command

    def _wait_until_live(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            if not self.running:
                raise ServerError(f"tritonserver ended at its start\n{self.errors()}".rstrip(), hint=self._hint)
            with contextlib.suppress(ServerError):
                self._call("/v2/health/live", timeout=2.0)
                self.metrics()  # its listener comes a moment later
                return
            time.sleep(0.05)
        raise ServerError(
            f"tritonserver did not load its models in {deadline:g} s\n{self.errors()}".rstrip(), hint=self._hint
        )

    def _check_models(self) -> None:
        index = json.loads(self._call("/v2/repository/index", body=b"{}", timeout=30.0))
        problems = [
            f"{model['name']} cannot be loaded: {_trim(model.get('reason', 'no reason given'))}"
            for model in index
            if model.get("state") != "READY"
        ]
        if problems or not index:
            raise ServerError("\n".join(problems) or f"{self.repository} holds no model", hint=self._hint)

    @property
    def _models(self) -> Path:
        return self._folder / "package" / self.repository.name

    @property
    def _patience(self) -> float:
        """Until a server that was told to end is killed: a client that keeps its stream open makes Triton wait on."""
        return self.grace + UNLOAD_S + 2.0

    @property
    def _hint(self) -> str:
        return f"its log: {self.log}"

    def _control(self, action: str, models: Sequence[str], deadline: float) -> None:
        def ask(model: str) -> None:
            try:
                self._call(f"/v2/repository/models/{model}/{action}", body=b"{}", timeout=deadline)
            except ServerError as error:
                raise ServerError(
                    f"{model} cannot be {action}ed: {error.message}", hint=f"the log: {self.log}"
                ) from None

        with concurrent.futures.ThreadPoolExecutor(max(1, len(models))) as pool:
            for job in [pool.submit(ask, model) for model in models]:
                job.result()

    def _call(self, path: str, *, body: bytes | None = None, timeout: float) -> str:
        url = f"http://{self.reach(self.addresses.http_host)}:{self.addresses.http}{path}"
        return self._fetch(urllib.request.Request(url, body, {GUARD: self.key}), timeout)

    def _fetch(self, request: str | urllib.request.Request, timeout: float = 5.0) -> str:
        try:
            # Without the environment's proxies, which know nothing of this host's ports.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=timeout) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError):
                text = json.loads(text)["error"]
            raise ServerError(_trim(text)) from None
        except (OSError, ValueError) as error:
            raise ServerError(str(error)) from None

    @staticmethod
    def reach(host: str) -> str:
        """An address of this host for one that means every interface."""
        return {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, host)


def _free_port(held: contextlib.ExitStack) -> int:
    """A port that is free now; held until all are found, so that no two are the same."""
    listener = held.enter_context(socket.socket())
    listener.bind((LOOPBACK, 0))
    return int(listener.getsockname()[1])


def _trim(text: Any) -> str:
    """A model's error without the traceback's frames: its last line says what it is."""
    lines = [line for line in str(text).splitlines() if line.strip()]
    frames = [line for line in lines if not re.match(r"\s+(File|at|\^)|\s{2,}|At:", line)]
    return "\n".join(frames[:6])
