"""The gRPC door in front of Triton's own: it bounds messages, says truly whether the server is ready, and drains.

Triton 24.10 can be told none of that: its own limit is 2 GiB a message, fixed. Everything else is passed on as it is,
message by message, of which only the first fields are read (0.15 ms of a core for each), and a client that cancels or
goes away is gone for Triton too. What comes over a stream that is open already is passed on while draining: the models
refuse it, as only they can tell an order to stop a request from a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from model_repo.trtseek_text import DRAINING
from pipeline.triton.addresses import listen
from pipeline.triton.gate import CLOSE_S, Gate, LostError
from pipeline.triton.owed import Owed

if TYPE_CHECKING:
    import grpc

SERVICE, HEALTH = "/inference.GRPCInferenceService/", "/grpc.health.v1.Health/"
# Questions about readiness, and the answer that nothing is ready, as protobuf encodes it.
NOT_READY = {
    f"{SERVICE}ServerReady": b"",  # ready: false
    f"{SERVICE}ModelReady": b"",
    f"{HEALTH}Check": b"\x08\x02",  # status: NOT_SERVING
}
INFER, STREAM = f"{SERVICE}ModelInfer", f"{SERVICE}ModelStreamInfer"
UNLIMITED = -1
# Answers of any size; and when Triton is started again, whoever asks next is answered.
UPSTREAM_OPTIONS = (
    ("grpc.max_receive_message_length", UNLIMITED),
    ("grpc.max_send_message_length", UNLIMITED),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
)
Metadata = tuple[tuple[str, str | bytes], ...]


class GrpcGate(Gate):
    async def _listen(self) -> None:
        from grpc import aio

        self._parting: set[asyncio.Future[None]] = set()  # asyncio itself does not keep them
        listen(self.host, self.port, "--grpc-port").close()  # of what is taken, gRPC does not say why
        options = (
            ("grpc.max_receive_message_length", self.max_bytes),
            ("grpc.max_send_message_length", UNLIMITED),
            ("grpc.so_reuseport", 0),
        )
        async with aio.insecure_channel(self.upstream, options=UPSTREAM_OPTIONS) as channel:
            server = aio.server(options=options)
            server.add_generic_rpc_handlers((_make_handler(self, channel),))
            host = f"[{self.host}]" if ":" in self.host else self.host
            self.port = server.add_insecure_port(f"{host}:{self.port}")
            await server.start()
            self._started.set()
            await self._wait_for_stop()
            await server.stop(CLOSE_S)

    async def handle(self, method: str, context: Any, channel: Any) -> None:
        """Answers one call."""
        import grpc

        if method in NOT_READY and not self.open:
            await context.write(NOT_READY[method])
            return
        if self.draining and method in (INFER, STREAM):
            await context.abort(grpc.StatusCode.UNAVAILABLE, DRAINING)
        counts = method == INFER  # what is in flight on streams, which may stay open and idle, the models count
        self.in_flight += counts
        owed = Owed()
        try:
            async with self._losable(owed):
                await self._relay(method, context, channel, owed)
        except LostError as lost:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(lost))
        finally:
            self.in_flight -= counts

    async def _relay(self, method: str, context: Any, channel: Any, owed: Owed) -> None:
        """One call, from a client to Triton and back. `owed` is told what passes."""
        import grpc

        metadata = _pass_on(context.invocation_metadata())
        call = channel.stream_stream(method)(metadata=metadata, timeout=context.time_remaining())
        asking = asyncio.ensure_future(_ask(context, call, owed))
        answering = asyncio.ensure_future(_answer(context, call, owed if method == STREAM else None))
        try:
            # A read that is cancelled cancels the call, which is to be decided below.
            await asyncio.shield(answering)
            code, text = await call.code(), await call.details()
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            if method == STREAM and not owed.models and not call.done():
                self._parting.add(parting := asyncio.ensure_future(_part(call, answering)))
                parting.add_done_callback(self._parting.discard)
            else:
                call.cancel()
            answering.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # which nobody waits for
        if code is grpc.StatusCode.UNAVAILABLE and channel.get_state() is not grpc.ChannelConnectivity.READY:
            text = self.absence
        context.set_trailing_metadata(_pass_on(await call.trailing_metadata()))
        if code is not grpc.StatusCode.OK:
            await context.abort(code, text or "")


def _make_handler(gate: GrpcGate, channel: Any) -> Any:
    import grpc

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            async def handle(_: object, context: Any) -> None:
                await gate.handle(details.method, context, channel)

            return grpc.stream_stream_rpc_method_handler(handle)  # a call of one message is one, too

    return Handler()


async def _answer(context: Any, call: Any, owed: Owed | None) -> None:
    """Triton's messages, to the client."""
    from grpc import aio

    with contextlib.suppress(aio.AioRpcError):  # which is what the call's code says
        while (answer := await call.read()) is not aio.EOF:
            if owed is not None:
                owed.hear_stream(answer)
            await context.write(answer)


async def _part(call: Any, answering: asyncio.Future[None]) -> None:
    """Ends a stream whose client has gone with all of its answers. It is not cancelled: of a request that is cancelled
    just when it ends Triton 24.10 keeps the model for ever, so that it cannot be unloaded at the end, or crashes."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await call.done_writing()
            await answering
    except Exception:  # the call has ended by itself, or will not
        pass
    finally:
        call.cancel()
        answering.cancel()


async def _ask(context: Any, call: Any, owed: Owed) -> None:
    """The client's messages, to Triton."""
    from grpc import aio

    try:
        while (message := await context.read()) is not aio.EOF:
            owed.ask(message)
            await call.write(message)
        await asyncio.shield(call.done_writing())  # cancelled, it would cancel the call
    except aio.AioRpcError:
        pass  # the call has ended, and says so where its answers are read
    except asyncio.InvalidStateError:
        pass


def _pass_on(metadata: Iterable[Any] | None) -> Metadata:
    """Without what is gRPC's own."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if not key.startswith(("grpc-", ":")) and key not in ("user-agent", "te", "content-type")
    )
