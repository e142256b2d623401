"""The HTTP door in front of Triton's own: it bounds requests, says truly whether the server is ready, and drains.

Triton 24.10 aborts at a JSON request whose shape is near 2**63, too. Everything else is passed on as it is, streams as
they come, and a client that goes away is gone for Triton too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from model_repo.trtseek_text import DRAINING
from pipeline.triton.addresses import refuse
from pipeline.triton.gate import CLOSE_S, Gate, LostError
from pipeline.triton.owed import Owed

if TYPE_CHECKING:
    from aiohttp import ClientSession, web

READY = "/v2/health/ready"
_MODEL = re.compile(r"/v2/models/([^/]+)")
_MODEL_READY = re.compile(rf"{_MODEL.pattern}(/versions/[^/]+)?/ready")
# Triton's own endpoints that run code or touch the host: for whoever started the server, and not through here.
CLOSED = ("/v2/repository", "/v2/systemsharedmemory", "/v2/cudasharedmemory", "/v2/trace", "/v2/logging")
# Of one connection only, not of the message (RFC 9110, 7.6.1), and what the client library sets itself.
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "host", "content-length", "te"})
# Of a request's body: aiohttp has undone them by the time it is read, and bounded what came out.
UNDONE = frozenset({"gzip", "deflate"})
EVENTS = "text/event-stream"
TLS = "HTTPS traffic"  # in what aiohttp says of a client that begins with it
HEADER_LENGTH = "Inference-Header-Content-Length"


class HttpGate(Gate):
    async def _listen(self) -> None:
        from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

        timeout = ClientTimeout(total=None)  # an answer takes as long as it takes
        async with ClientSession(
            timeout=timeout, auto_decompress=False, connector=TCPConnector(limit=0), trust_env=False
        ) as session:

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(request, session)

            application = web.Application(client_max_size=self.max_bytes)
            application.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(
                application,
                handler_cancellation=True,
                access_log=None,
                shutdown_timeout=CLOSE_S,
                logger=_make_logger(self),
            )
            try:
                await runner.setup()
                await web.TCPSite(runner, self.host, self.port).start()
                self.port = self.port or runner.addresses[0][1]
            except OSError as error:
                raise refuse(self.host, self.port, error, "--http-port") from error
            self._started.set()
            await self._wait_for_stop()
            await runner.cleanup()

    async def _handle(self, request: web.Request, session: ClientSession) -> web.StreamResponse:
        from aiohttp import web

        if request.path == READY:
            return web.Response(status=200 if self.open else 503)
        if _MODEL_READY.fullmatch(request.path) and not self.open:
            return web.Response(status=503)  # no model is; else Triton knows
        if request.path.startswith(CLOSED):
            return _refuse(403, "this API is not served here")
        if self.draining and request.method == "POST":
            return _refuse(503, DRAINING)
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _refuse(413, f"a request may have {self.max_bytes} bytes (serve --max-request-mb)")
        except web.RequestPayloadError as error:
            return _refuse(400, f"the request cannot be read: {error}")
        if problem := find_problem(request.path, request.headers, body, self.max_bytes):
            return _refuse(400, problem)
        self.in_flight += 1
        try:
            return await self._forward(request, body, session)
        finally:
            self.in_flight -= 1

    async def _forward(self, request: web.Request, body: bytes, session: ClientSession) -> web.StreamResponse:
        from aiohttp import ClientError, web
        from yarl import URL

        url = URL(self.upstream + request.raw_path, encoded=True)
        undone = request.headers.get("Content-Encoding", "").lower() in UNDONE
        left_out = HOP_BY_HOP | {"content-encoding"} if undone else HOP_BY_HOP
        headers = {name: value for name, value in request.headers.items() if name.lower() not in left_out}
        response: web.StreamResponse | None = None
        owed = Owed(match[1]) if (match := _MODEL.match(request.path)) else Owed()
        try:
            async with (
                self._losable(owed),
                session.request(request.method, url, headers=headers, data=body or None) as answer,
            ):
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    owed.hear()
                    await response.write(chunk)
        except (ClientError, LostError) as lost:
            status, reason = (503, str(lost)) if isinstance(lost, LostError) else (502, self.absence)
            if response is None or not response.prepared:
                return _refuse(status, reason)
            if response.content_type == EVENTS:
                # It ends as Triton ends that of a model that fails; what has come of an event, first.
                with contextlib.suppress(ConnectionError):  # the client may be what was lost, and is told nothing
                    await response.write(f"\n\ndata: {json.dumps({'error': reason})}\n\n".encode())
            elif request.transport is not None:
                request.transport.abort()
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response


def _make_logger(gate: HttpGate) -> logging.Logger:
    """For faults of the gate's own: what is not HTTP is answered with 400, and fills nobody's log. That it is TLS,
    whose client understands no answer, is said once."""
    from aiohttp.http_exceptions import HttpProcessingError

    told = False

    def is_ours(record: logging.LogRecord) -> bool:
        nonlocal told
        if not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)):
            return record.levelno >= logging.WARNING
        if told or TLS not in str(record.exc_info[1]):
            return False
        told, record.exc_info, record.args = True, None, None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = (
            f"a client speaks TLS to {gate.host}:{gate.port}, which is plain HTTP: ask it as http://, or put a proxy "
            "that ends TLS in front (said once)"
        )
        return True

    logger = logging.Logger(__name__, logging.DEBUG)  # as which aiohttp tells of what is no HTTP from the beginning
    logger.parent = logging.getLogger("aiohttp.server")
    logger.addFilter(is_ours)
    return logger


def find_problem(path: str, headers: Mapping[str, str], body: bytes, max_bytes: int) -> str | None:
    """What is wrong with the shapes of a JSON inference request; everything else is Triton's to judge."""
    if not path.endswith("/infer"):
        return None
    try:
        length = int(headers.get(HEADER_LENGTH, len(body)))
        document = json.loads(body[:length])
        shapes = [tensor["shape"] for tensor in document["inputs"]]
    except (ValueError, KeyError, TypeError) as error:
        return f"not an inference request: {error!r}"
    except RecursionError:
        return "not an inference request: it is nested too deeply"
    for shape in shapes:
        if not _is_shape(shape, max_bytes):
            return f"a tensor has the shape {str(shape)[:100]}"
    return None


def _is_shape(shape: Any, largest: int) -> bool:
    """Whether a list of sizes can be a tensor of at most so many elements."""
    if not isinstance(shape, list) or len(shape) > 16:
        return False
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= largest for size in shape):
        return False
    return math.prod(shape) <= largest


def _refuse(status: int, message: str) -> web.Response:
    from aiohttp import web

    return web.json_response({"error": message}, status=status)
