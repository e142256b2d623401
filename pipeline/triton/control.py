"""What Triton tells, and lets itself be told, over HTTP: by who started it alone, where it touches the host."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from pipeline.triton.addresses import Addresses, reach
from pipeline.triton.errors import ServerError

# Loading and unloading run code of the caller's choice, and shared memory and traces touch the host's files: only
# who started the server may, by a header that nobody else knows.
GUARDED_APIS = ("model-repository", "shared-memory", "trace", "logging")
GUARD = "trtseek-key"


class Control:
    """Of one server. `hint`: where a reader finds more."""

    def __init__(self, addresses: Addresses, *, hint: str) -> None:
        self.addresses, self.key, self._hint = addresses, secrets.token_hex(16), hint

    def options(self) -> list[str]:
        """tritonserver's own options that keep what is guarded to this."""
        guarded = f"{','.join(GUARDED_APIS)}:{GUARD}={self.key}"
        return [f"--http-restricted-api={guarded}", f"--grpc-restricted-protocol={guarded}"]

    def is_live(self) -> bool:
        """Whether it answers, its metrics too: their listener comes a moment later."""
        with contextlib.suppress(ServerError):
            self._call("/v2/health/live", timeout=2.0)
            self.metrics()
            return True
        return False

    def metrics(self) -> str:
        """In Prometheus' text format. Raises ServerError."""
        return self._fetch(f"http://{reach(self.addresses.metrics_host)}:{self.addresses.metrics}/metrics")

    def find_unloaded(self) -> dict[str, str]:
        """By model, that it could not be loaded and why; one line where there is no model at all."""
        index = json.loads(self._call("/v2/repository/index", body=b"{}", timeout=30.0))
        problems = {
            model["name"]: f"{model['name']} cannot be loaded: {_trim(model.get('reason', 'no reason given'))}"
            for model in index
            if model.get("state") != "READY"
        }
        return problems if index else {"": "there is no model in it"}

    def load(self, *models: str, deadline: float) -> None:
        """Loads models, all at once. Raises ServerError with the reason of the first that cannot be."""
        self._ask_for("load", models, deadline)

    def unload(self, *models: str, deadline: float) -> None:
        self._ask_for("unload", models, deadline)

    def _ask_for(self, action: str, models: Sequence[str], deadline: float) -> None:
        def ask(model: str) -> None:
            try:
                self._call(f"/v2/repository/models/{model}/{action}", body=b"{}", timeout=deadline)
            except ServerError as error:
                raise ServerError(f"{model} cannot be {action}ed: {error.message}", hint=self._hint) from None

        with concurrent.futures.ThreadPoolExecutor(max(1, len(models))) as pool:
            for job in [pool.submit(ask, model) for model in models]:
                job.result()

    def _call(self, path: str, *, body: bytes | None = None, timeout: float) -> str:
        url = f"http://{reach(self.addresses.host)}:{self.addresses.http}{path}"
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


def _trim(text: Any) -> str:
    """A model's error without the traceback's frames: its last line says what it is."""
    lines = [line for line in str(text).splitlines() if line.strip()]
    frames = [line for line in lines if not re.match(r"\s+(File|at|\^)|\s{2,}|At:", line)]
    return "\n".join(frames[:6])
