"""Asks a server that serves the emitted repository, over gRPC through tritonclient, and streams the answer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.runtime.errors import ServingError
from pipeline.triton.errors import ServerError
from pipeline.triton.query import Query, build_inputs, build_parameters

if TYPE_CHECKING:
    import numpy.typing as npt

DEFAULT_URL = "localhost:8001"
# What tritonclient says of a stream whose end, with its reason, is among the replies.
_BROKEN = "no longer in valid state"
# What gRPC says of a server that it does not get to; anything else that is "unavailable" a server has said itself.
_ABSENT = ("connect", "socket", "resolving", "dns resolution")
# How addresses of other protocols begin: gRPC would look for a host of that name.
_FOREIGN = ("http://", "https://", "grpc://", "grpcs://")


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came back; output_ids: None where none were asked for, or the server has none to give beside text. Seconds
    count from when the query was sent; time_to_first: until the first text or token."""

    text: str = ""
    output_ids: list[int] | None = None
    log_probs: list[float] = field(default_factory=list)
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    time_to_first: float | None = None
    seconds: float = 0.0


class Client:
    """One gRPC connection, for one query at a time. A context manager."""

    def __init__(self, url: str = DEFAULT_URL) -> None:
        from tritonclient.grpc import InferenceServerClient

        if not url.strip() or url.lower().startswith(_FOREIGN):
            problem = f"is {url}, and gRPC's has no scheme" if url.strip() else "is empty"
            raise ServerError(f"the server's address {problem}", hint="give its gRPC address as --url HOST:PORT")
        self.url = url
        self._client: Any = InferenceServerClient(url)
        self._replies: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._cancelled = False

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def cancel(self) -> None:
        """From another thread: the query that is being asked ends with ServingError, here and on the server; so does
        every one after it."""
        self._cancelled = True
        self._replies.put((None, None))

    def ask(
        self, query: Query, *, on_text: Callable[[str], object] | None = None, timeout: float | None = None
    ) -> Answer:
        """Sends a query and waits for its end; `on_text` sees the text as it comes. Interrupted (Ctrl-C, or what
        `on_text` raises), it cancels the query on the server.

        Raises ServerError where no server answers, ServingError for what the server answers instead.
        """
        answer, began = Answer(), time.monotonic()
        for arrays in self._stream(query, began, timeout):
            _merge(answer, arrays, began)
            if on_text is not None and "text_output" in arrays:
                on_text(arrays["text_output"].reshape(-1)[0].decode())
        answer.seconds = time.monotonic() - began
        return answer

    def _stream(self, query: Query, began: float, timeout: float | None) -> Iterator[dict[str, npt.NDArray[Any]]]:
        from tritonclient.utils import InferenceServerException

        replies = self._replies = queue.SimpleQueue()  # before it is looked whether it is cancelled: see `cancel`
        if self._cancelled:
            raise ServingError("the query was cancelled")
        self._client.start_stream(lambda result, error: replies.put((result, error)))
        finished = False
        try:
            try:
                self._client.async_stream_infer(
                    query.model,
                    build_inputs(query),
                    request_id=query.request_id,
                    enable_empty_final_response=True,
                    parameters=build_parameters(query) or None,
                )
            except InferenceServerException as refusal:
                if _BROKEN not in refusal.message():  # nothing was sent, and nobody will answer
                    raise ServingError(refusal.message()) from None
            while not finished:
                left = None if timeout is None else began + timeout - time.monotonic()
                try:
                    result, error = replies.get(timeout=left if left is None else max(0.0, left))
                except queue.Empty:
                    raise ServingError(f"{self.url} has not answered in full after {timeout:g} s") from None
                if self._cancelled:
                    raise ServingError("the query was cancelled")
                if error is not None:
                    raise _explain(error, self.url)
                response = result.get_response()
                finished = response.parameters["triton_final_response"].bool_param
                if arrays := {output.name: result.as_numpy(output.name) for output in response.outputs}:
                    yield arrays
        finally:
            # Cancelling a stream that is done costs nothing; one that is not must not go on generating.
            self._client.stop_stream(cancel_requests=not finished)


def _merge(answer: Answer, arrays: Mapping[str, npt.NDArray[Any]], began: float) -> None:
    if "text_output" in arrays:
        answer.text += arrays["text_output"].reshape(-1)[0].decode()
    if "output_ids" in arrays:
        answer.output_ids = [*(answer.output_ids or ()), *arrays["output_ids"].reshape(-1).tolist()]
    if "output_log_probs" in arrays:
        answer.log_probs += arrays["output_log_probs"].reshape(-1).tolist()
    for name in ("num_input_tokens", "num_output_tokens"):
        if name in arrays:
            setattr(answer, name, int(arrays[name].item()))
    if answer.time_to_first is None and (answer.text or answer.output_ids):
        answer.time_to_first = time.monotonic() - began


def _explain(error: Any, url: str) -> Exception:
    """A tritonclient error as one of ours: the server's absence apart from what it answered."""
    status, message = str(error.status() or ""), str(error.message() or error)
    with contextlib.suppress(AttributeError):
        message = str(error.debug_details().details() or message)
    if "UNAVAILABLE" in status and any(word in message.lower() for word in _ABSENT):
        return ServerError(
            f"no server answers at {url}: {message.rpartition(': ')[2].rstrip(']')}",
            hint="start one with `trtseek serve CONFIG`, or give its gRPC address as --url HOST:PORT",
        )
    too_large = "RESOURCE_EXHAUSTED" in status and "larger than max" in message  # gRPC's own words
    return ServingError(message, hint="serve --max-request-mb says how large a request may be" if too_large else "")


def ask_all(
    queries: Sequence[Query], *, url: str = DEFAULT_URL, concurrency: int = 4, timeout: float | None = None
) -> Iterator[Answer | Exception]:
    """Answers in the order of the queries, `concurrency` of them asked at a time, each on a connection of its own. What
    a query fails with stands in the place of its answer. Left before the last answer, it cancels those being asked."""

    def ask(query: Query) -> Answer | Exception:
        client = idle.get()
        try:
            return client.ask(query, timeout=timeout)
        except (ServingError, ServerError) as error:
            return error
        finally:
            idle.put(client)

    idle: queue.SimpleQueue[Client] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(url)) for _ in range(concurrency)]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(concurrency))
        for client in clients:
            idle.put(client)
            stack.callback(client.cancel)  # before the pool is left, which waits for what it runs
        yield from pool.map(ask, queries)
