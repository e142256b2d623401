"""The `tensorrt_llm` model in a Triton stub: requests in, the executor in between, replies out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from model_repo.trtseek_text import DRAINING, is_draining, poll_seconds
from pipeline.errors import TrtseekError
from pipeline.runtime.errors import RequestError, ServingError, ShutdownError
from pipeline.runtime.executor import Executor, ExecutorSettings
from pipeline.runtime.policy import Policy
from pipeline.runtime.request import Priority
from pipeline.triton.backend.door import Door
from pipeline.triton.backend.metrics import Metrics
from pipeline.triton.backend.replies import Outbox, Reply
from pipeline.triton.backend.requests import is_stop, name_tensor, read_requests, read_wanted
from pipeline.triton.backend.stub import StubSender, read_parameters, read_tensors

if TYPE_CHECKING:
    from pipeline.runtime.handle import Callback, Handle
    from pipeline.runtime.request import Request
    from pipeline.triton.backend.loading import Loaded
    from pipeline.triton.backend.responses import Arrays
    from pipeline.triton.backend.senders import Sender

PUBLISH_S = 0.5
# Triton gives a model's process so long to end; requests in flight have ended before, or the server was told to hurry.
CLOSE_S = 5.0


class Service:
    """One model instance. `execute` returns at once; everything else happens on the service's own threads."""

    def __init__(
        self,
        module: Any,
        loaded: Loaded,
        parameters: Mapping[str, str],
        *,
        model: str,
        version: str,
        is_entry: bool = True,
    ) -> None:
        """`module`: triton_python_backend_utils. `is_entry`: what comes through Triton comes from clients, and is
        refused while the server drains; not where the text models ask through Triton too, which refuse themselves."""
        self._is_entry = is_entry
        self._module, self.log, self.loaded = module, module.Logger, loaded
        self.executor = Executor(
            self.loaded.runner, self.loaded.limits, vocab_size=self.loaded.vocab_size, settings=_settings(parameters)
        )
        limits = self.loaded.limits
        self.executor.statistics.set(
            max_requests=limits.max_batch_size, max_blocks=limits.num_blocks - 1, tokens_per_block=limits.block_size
        )
        self.metrics = Metrics(self.executor.statistics, module, model=model, version=version)
        self._replies: dict[Reply, None] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._outbox = Outbox(lambda error: self.log.log_error(f"a response was not sent: {error!r}"))
        self._attendant = threading.Thread(target=self._attend, name="attendant", daemon=True)
        self.log.log_info(
            f"{model} serves by the {self.loaded.kind}: {limits.max_batch_size} sequences, "
            f"{limits.num_blocks - 1} blocks of {limits.block_size} tokens"
        )
        self._door = Door(model, self._accept_guest)
        self.executor.start()
        self._attendant.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._take(
                partial(read_tensors, request),
                StubSender(self._module, request.get_response_sender()),
                request_id=str(request.request_id() or ""),
                parameters=read_parameters(request),
                timeout_us=int(request.timeout() or 0),
                is_new=self._is_entry,
            )

    def close(self) -> None:
        """Ends what runs; whoever still waits is told."""
        self.executor.shutdown(drain=False)
        self._outbox.close()
        self._door.close()
        self._closed.set()
        self._attendant.join(CLOSE_S)
        self.loaded.close()

    def _accept_guest(self, head: dict[str, Any], arrays: Arrays, sender: Sender) -> Reply | None:
        """A request by the door."""
        return self._take(
            lambda: arrays,
            sender,
            request_id=head["request_id"],
            parameters=head["parameters"],
            timeout_us=head["timeout_us"],
            is_new=False,
        )

    def _take(self, read: Callable[[], Arrays], sender: Sender, **options: Any) -> Reply | None:
        """Starts a request. An answer is owed, whatever goes wrong: without one a client waits for ever."""
        try:
            return self._accept(read(), sender, **options)
        except Exception as error:
            if not isinstance(error, TrtseekError):
                self.log.log_error(f"a request was not understood: {error!r}")
                error = ServingError(f"the request was not understood: {error!r}")
            sender.send_error(error, final=True)
            return None

    def _accept(
        self,
        tensors: Arrays,
        sender: Sender,
        *,
        request_id: str,
        parameters: Mapping[str, Any],
        timeout_us: int,
        is_new: bool,
    ) -> Reply | None:
        if is_stop(tensors):
            if not request_id:
                raise RequestError("stop", "needs the id of the request that is to be stopped")
            self._stop(request_id)
            sender.send_final()
            return None
        if is_new and is_draining():
            raise ShutdownError(DRAINING)
        if not self.executor.healthy:
            raise ServingError("the executor has failed", hint="the model has to be loaded again")
        requests = read_requests(
            tensors,
            request_id=request_id,
            vocab_size=self.loaded.vocab_size,
            parameters=parameters,
            timeout_us=timeout_us,
        )
        reply = Reply(sender, len(requests), request_id=request_id, wanted=read_wanted(tensors), on_done=self._forget)
        with self._lock:
            self._replies[reply] = None
        for row, wanted in enumerate(requests):
            reply.start(row, partial(self._submit, wanted), self._outbox)
        return reply

    def _submit(self, request: Request, on_update: Callback) -> Handle:
        try:
            return self.executor.submit(request, on_update)
        except RequestError as error:
            raise name_tensor(error) from None

    def _stop(self, request_id: str) -> None:
        with self._lock:
            replies = [reply for reply in self._replies if reply.request_id == request_id]
        for reply in replies:
            reply.cancel()

    def _forget(self, reply: Reply) -> None:
        with self._lock:
            self._replies.pop(reply, None)

    def _attend(self) -> None:
        """Ends the requests whose clients have gone, and publishes metrics."""
        published = time.monotonic()  # once already, before it is said that the model is loaded
        while True:
            with self._lock:
                replies = list(self._replies)
            for reply in replies:
                if reply.is_cancelled():
                    reply.cancel()
            now = time.monotonic()
            if now - published >= PUBLISH_S:
                self.metrics.publish()
                published = now
            if self._closed.wait(poll_seconds(len(replies))):
                return


def _settings(parameters: Mapping[str, str]) -> ExecutorSettings:
    """The executor's settings from the model's parameters, in TensorRT-LLM's spelling."""
    waiting = int(parameters.get("max_queue_size", "0"))
    return ExecutorSettings(
        policy=Policy(parameters.get("batch_scheduler_policy", Policy.GUARANTEED_NO_EVICT.value)),
        reuse_blocks=parameters.get("enable_kv_cache_reuse", "true").lower() == "true",
        queue_limits=dict.fromkeys(Priority, waiting or None),
    )
