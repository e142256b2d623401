"""A running tritonserver: its command line, its start with a deadline, its models, its end without remains.

It loads its models at the start, all at once, and goes on where one cannot be loaded, so that it can be asked why. It
runs in explicit mode, so that a model whose process died can be loaded again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from model_repo.trtseek_text import DRAIN_MARK
from pipeline.triton.addresses import Addresses
from pipeline.triton.control import Control
from pipeline.triton.emission import ARTIFACTS
from pipeline.triton.errors import ServerError
from pipeline.triton.installation import Installation, mirror
from pipeline.triton.keeper import FOLDER
from pipeline.triton.kept import Kept
from pipeline.triton.processes import PREFIX, find_stubs, remove_remains
from pipeline.triton.server_log import ServerLog
from pipeline.triton.shortage import ADVICE, Shortage

STUB_S = 300
# Triton's exit time-out counts requests in flight and the end of its models' processes together.
UNLOAD_S = 10.0
# Of a model whose process got no processor for a second while it was loaded, as on a busy machine: Triton has given it
# up (see keeper.Overdue), and it is loaded again.
GIVEN_UP = "is not healthy"
# Of a tritonserver that aborted because it got no lock that it shares with such a process, which was killed with it,
# or got no time while it was imported, before Triton watches it.
ABORTED = "lock_exception"


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
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`backends`: folders of Python-based backends. `grace`: seconds that requests in flight have at the end.
        `options`: more of tritonserver's own; `environment`: for it and for its models' processes."""
        self.installation, self.repository, self.backends = installation, repository, tuple(backends)
        self.log, self.grace, self.options = log, grace, tuple(options)
        self.environment = dict(environment or {})
        self.addresses = (addresses or Addresses()).resolve()
        self.control = Control(self.addresses, hint=self._hint)
        self.prefix = f"{PREFIX}_{os.getpid()}_{secrets.token_hex(4)}_"
        self._kept: Kept | None = None
        self._folder: Path | None = None  # made by start; there is nothing to remove before
        self._log = ServerLog(log)
        self.shortage = Shortage(self._log)

    def start(self, deadline: float) -> None:
        """Starts it and waits until every model is loaded. Raises ServerError with the reasons where one cannot be, or
        not within `deadline` seconds: a model's process that cannot start makes Triton wait for ever."""
        self.addresses.check()
        self.shortage.renew()
        try:
            self._launch()
            end = time.monotonic() + deadline
            self._wait_until_live(end, deadline)
            self._load_given_up(end)
            if problems := self.control.find_unloaded():
                raise ServerError("\n".join(problems.values()), hint=self._hint)
        except BaseException as error:
            self.stop(grace=0)
            if isinstance(error, ServerError) and (cause := self.shortage.describe()) and cause not in error.message:
                raise ServerError(f"{error.message}\n{cause}", hint=f"{ADVICE}; {self._hint}") from error
            raise

    def load(self, *models: str, deadline: float) -> None:
        """Loads models of a server that runs. Raises ServerError with the reason of the first that cannot be, or not
        within `deadline` seconds."""
        end = time.monotonic() + deadline
        try:
            self.control.load(*models, deadline=deadline)
        except ServerError as error:
            if GIVEN_UP not in error.message:
                raise
            self._load_given_up(end)

    def drain(self) -> None:
        """From now on new requests are refused, over every protocol, and those in flight are answered. Triton itself
        cannot do that: it takes what comes over open gRPC connections until it ends; and so it does here where the
        mark cannot be made, as on a full disk, which is no reason not to end."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._drain_mark.touch()

    def stop(self, *, grace: float | None = None) -> int | None:
        """Ends it: new requests are refused, those in flight have `self.grace` seconds; or the whole end has `grace`.
        Interrupted, it ends it at once.

        Returns the exit status, 0 for a clean end; None where it did not run."""
        status = None
        try:
            if self._kept is not None:
                self.drain()
                kept, self._kept = self._kept, None
                status = kept.stop(self._patience if grace is None else grace)
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
        return status

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the process is there. It says nothing about the models: ask one."""
        return self._kept is not None and self._kept.running

    @property
    def pid(self) -> int | None:
        """Of tritonserver; None where it does not run."""
        return None if self._kept is None else self._kept.pid

    @property
    def stubs(self) -> dict[int, str]:
        """The Python models' processes, by process id: the name that the stub was started with."""
        return {} if self.pid is None else find_stubs(self.pid)

    def errors(self) -> str:
        """The log's last errors since it served last, or was started, for messages."""
        return self._log.errors()

    def _launch(self) -> None:
        self._log.open()
        remove_remains()
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER))
        self.installation.link_backends(self._backends, *self.backends)
        mirror(self.repository, self._models)
        if (artifacts := self.repository.parent / ARTIFACTS).is_dir():  # which the models name by relative paths
            (self._models.parent / ARTIFACTS).symlink_to(artifacts.resolve(), target_is_directory=True)
        job = {
            "command": self.command(),
            "log": str(self.log.resolve()),
            "grace": self._patience,
            "shared_memory_prefix": self.prefix,
            "folder": str(self._place),
            "start_in": str(self._models.parent),  # the package's own, as launch.sh does
        }
        own = {**self.environment, DRAIN_MARK: str(self._drain_mark)}
        self._kept = Kept(job, {**self.installation.environment(), **own})

    def command(self) -> list[str]:
        """The command line. Its defaults would listen on every interface, and wait 30 s at most for a model's stub."""
        addresses = self.addresses
        command = [
            str(self.installation.binary),
            f"--model-repository={self._models}",
            f"--backend-directory={self._backends}",
            "--model-control-mode=explicit",
            "--load-model=*",
            "--disable-auto-complete-config",  # it starts every stub twice
            "--exit-on-error=false",
            f"--exit-timeout-secs={round(self.grace + UNLOAD_S)}",
            f"--http-address={addresses.host}",
            f"--grpc-address={addresses.host}",
            f"--metrics-address={addresses.metrics_host}",
            f"--http-port={addresses.http}",
            f"--grpc-port={addresses.grpc}",
            f"--metrics-port={addresses.metrics}",
            "--metrics-interval-ms=1000",
            f"--backend-config=python,stub-timeout-seconds={STUB_S}",
            f"--backend-config=python,shm-region-prefix-name={self.prefix}",
            *self.control.options(),
            *self.options,
        ]
        if self.installation.caches is not None:
            command.append(f"--cache-directory={self.installation.caches}")
        return command

    def _wait_until_live(self, end: float, deadline: float) -> None:
        while time.monotonic() < end:
            if self.control.is_live():
                return
            if not self.running:
                errors = self.errors()
                if ABORTED not in errors:
                    raise ServerError(f"tritonserver ended at its start\n{errors}".rstrip(), hint=self._hint)
                self.stop(grace=0)
                self._launch()
            time.sleep(0.05)
        raise ServerError(
            f"tritonserver did not load its models in {deadline:g} s\n{self.errors()}".rstrip(), hint=self._hint
        )

    def _load_given_up(self, end: float) -> None:
        """Loads what Triton has given up again, until there is nothing of it, or it is too late. Raises ServerError."""
        while given_up := [name for name, problem in self.control.find_unloaded().items() if GIVEN_UP in problem]:
            if self.shortage.lasts:
                problem = f"{', '.join(given_up)} cannot be loaded: {self.shortage.describe()}"
                raise ServerError(problem, hint=f"{ADVICE}; {self._hint}")
            try:
                self.control.load(*given_up, deadline=max(0.1, end - time.monotonic()))
            except ServerError as error:
                if GIVEN_UP not in error.message or time.monotonic() > end:
                    raise

    @property
    def _place(self) -> Path:
        if self._folder is None:
            raise RuntimeError("the server was not started")
        return self._folder

    @property
    def _drain_mark(self) -> Path:
        return self._place / "draining"

    @property
    def _backends(self) -> Path:
        return self._place / "backends"

    @property
    def _models(self) -> Path:
        return self._place / "package" / self.repository.name

    @property
    def _patience(self) -> float:
        """Until a server that was told to end is killed: a client that keeps its stream open makes Triton wait on."""
        return self.grace + UNLOAD_S + 2.0

    @property
    def _hint(self) -> str:
        return f"its log: {self.log}"
