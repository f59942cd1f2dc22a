"""Outboxes, the reconnecting end and the serving end of a multiplexed stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from slipstream.errors import Internal, InvalidArgument, ResourceExhausted, SlipstreamError, Unavailable
from slipstream.rpc import multiplexed_stream
from slipstream.rpc.channel import MAX_MESSAGE_BYTES, channel
from slipstream.rpc.multiplexed_stream import (
    CAPACITY,
    FRAME_BYTES,
    MAX_ITEM_BYTES,
    ByteCounter,
    MultiplexedStream,
    SendQueue,
    split_frames,
)
from slipstream.rpc.server import Server
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2
from tests.support.loopback_addresses import ANY

Command = drafter_pb2.DraftCommand


def command(number: int) -> Command:
    return Command(session=number)


def pack(commands: list[Command]) -> drafter_pb2.DraftRequest:
    return drafter_pb2.DraftRequest(commands=commands)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


# Outboxes.


async def test_an_outbox_gives_everything_at_once_and_in_order() -> None:
    outbox = SendQueue[Command]()
    for number in range(5):
        outbox.put(command(number))
    assert [item.session for item in await outbox.take()] == [0, 1, 2, 3, 4]
    outbox.put(command(5))
    assert [item.session for item in await outbox.take()] == [5]


async def test_taking_from_an_empty_outbox_waits_for_a_put() -> None:
    outbox = SendQueue[Command]()
    taken = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taken.done()
    outbox.put(command(1))
    assert len(await taken) == 1


async def test_an_outbox_overflows_instead_of_growing() -> None:
    outbox = SendQueue[Command](capacity=2)
    guard = asyncio.create_task(outbox.overflow())
    outbox.put(command(1))
    outbox.put(command(2))
    await asyncio.sleep(0)
    assert not guard.done()
    with pytest.raises(ResourceExhausted):
        outbox.put(command(3))
    assert len(outbox) == 2
    with pytest.raises(ResourceExhausted):
        await guard


def of_size(size: int) -> Command:
    """A command of exactly so many bytes: one byte for each token, 17 for all else."""
    made = Command(session=9, open=drafter_pb2.DraftOpen(prefix=types_pb2.Prefix(token_ids=[1] * (size - 17))))
    assert made.ByteSize() == size
    return made


async def test_an_item_that_no_frame_can_hold_is_refused_alone() -> None:
    outbox = SendQueue[Command]()
    outbox.put(command(1))
    with pytest.raises(InvalidArgument) as refused:
        outbox.put(of_size(MAX_ITEM_BYTES + 1))
    assert refused.value.reason == "MESSAGE_TOO_LARGE"
    outbox.put(of_size(MAX_ITEM_BYTES))
    assert [item.session for item in await outbox.take()] == [1, 9]


def test_a_frame_of_the_largest_item_passes_grpc() -> None:
    (batch,) = split_frames([of_size(MAX_ITEM_BYTES)])
    assert pack(batch).ByteSize() <= MAX_MESSAGE_BYTES


async def test_a_closed_outbox_gives_the_rest_and_then_nothing() -> None:
    outbox = SendQueue[Command]()
    outbox.put(command(1))
    outbox.close()
    with pytest.raises(Unavailable):
        outbox.put(command(2))
    assert len(await outbox.take()) == 1
    assert await outbox.take() == []


async def test_closing_an_outbox_wakes_a_waiting_reader() -> None:
    outbox = SendQueue[Command]()
    taken = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.close()
    assert await taken == []


def test_frames_keep_the_order_and_the_size() -> None:
    prefix = types_pb2.Prefix(token_ids=[1] * 300_000)
    items = [Command(session=n, open=drafter_pb2.DraftOpen(prefix=prefix)) for n in range(20)]
    batches = list(split_frames(items))
    assert [item.session for batch in batches for item in batch] == list(range(20))
    assert len(batches) == 4
    assert all(pack(batch).ByteSize() <= FRAME_BYTES + 1000 for batch in batches)


# The dialling end, on calls of the test's making.


class Word(str):
    """A frame."""

    def ByteSize(self) -> int:
        return len(self)


class FakeCall:
    """One stream. `arrive` a frame, an exception or EOF."""

    def __init__(self, *, refuses: BaseException | None = None, write_error: Exception | None = None) -> None:
        self.refuses, self.write_error = refuses, write_error
        self.written: list[Command] = []
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False

    async def wait_for_connection(self) -> None:
        if self.refuses is not None:
            raise self.refuses

    async def write(self, request: drafter_pb2.DraftRequest) -> None:
        if self.write_error is not None:
            raise self.write_error
        self.written.extend(request.commands)

    async def read(self) -> Any:
        arrived = await self.incoming.get()
        if isinstance(arrived, BaseException):
            raise arrived
        return Word(arrived) if isinstance(arrived, str) else arrived

    def cancel(self) -> bool:
        if not self.cancelled:
            self.cancelled = True
            self.incoming.put_nowait(asyncio.CancelledError())
        return True


class Recorder:
    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.fails: dict[str, Exception] = {}

    def _hear(self, kind: str, what: Any) -> None:
        self.heard.append(what)
        if kind in self.fails:
            raise self.fails.pop(kind)

    def connected(self) -> None:
        self._hear("connected", "connected")

    def receive(self, frame: Any) -> None:
        self._hear("receive", frame)

    def lost(self, error: SlipstreamError) -> None:
        self._hear("lost", type(error))


@asynccontextmanager
async def linked(
    calls: list[FakeCall], recorder: Recorder
) -> AsyncIterator[MultiplexedStream[Command, drafter_pb2.DraftRequest, Any]]:
    left = iter(calls)
    link: MultiplexedStream[Command, drafter_pb2.DraftRequest, Any] = MultiplexedStream(
        lambda: next(left), pack, recorder, max_backoff_s=0.001
    )
    running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.wait([running], timeout=60)
        assert running.cancelled(), running


async def test_a_link_counts_the_bytes_that_it_sends_and_receives() -> None:
    call, recorder, traffic = FakeCall(), Recorder(), ByteCounter()
    link: MultiplexedStream[Command, drafter_pb2.DraftRequest, Any] = MultiplexedStream(
        lambda: call, pack, recorder, traffic=traffic
    )
    running = asyncio.create_task(link.run())
    await until(lambda: link.up)
    link.send(Command(session=7, epoch=1))
    for word in ("one", "three"):
        call.incoming.put_nowait(word)
    await until(lambda: len(call.written) == 1 and "three" in recorder.heard)
    running.cancel()
    await asyncio.wait([running], timeout=60)
    assert traffic.by_label("verifier") == {
        ("verifier", "sent"): pack(call.written).ByteSize(),
        ("verifier", "received"): len("one" + "three"),
    }


async def test_a_link_reports_connection_frames_and_loss_in_order_and_connects_again() -> None:
    first, second, recorder = FakeCall(), FakeCall(), Recorder()
    async with linked([first, second], recorder) as link:
        for frame in ("a", "b", grpc.aio.EOF):
            first.incoming.put_nowait(frame)
        await until(lambda: recorder.heard.count("connected") == 2)
        assert link.up
        second.incoming.put_nowait("c")
        await until(lambda: "c" in recorder.heard)
    assert recorder.heard == ["connected", "a", "b", Unavailable, "connected", "c"]
    assert first.cancelled and second.cancelled


async def test_items_are_sent_in_order_and_never_on_a_later_stream() -> None:
    first, second, recorder = FakeCall(), FakeCall(), Recorder()
    async with linked([first, second], recorder) as link:
        with pytest.raises(Unavailable):
            link.send(command(0))
        await until(lambda: link.up)
        for number in (1, 2, 3):
            link.send(command(number))
        await until(lambda: len(first.written) == 3)
        link.send(command(4))
        first.incoming.put_nowait(Unavailable("gone"))
        await until(lambda: recorder.heard.count("connected") == 2)
        link.send(command(5))
        await until(lambda: bool(second.written))
    assert [item.session for item in first.written][:3] == [1, 2, 3]
    assert [item.session for item in second.written] == [5]


async def test_a_peer_that_was_never_reached_is_not_reported_lost() -> None:
    refusing, good, recorder = FakeCall(refuses=Unavailable("no")), FakeCall(), Recorder()
    async with linked([refusing, good], recorder) as link:
        await until(lambda: link.up)
    assert recorder.heard == ["connected"]


@pytest.mark.parametrize("hook", ["connected", "receive"])
@pytest.mark.parametrize("error", [ValueError("bug"), InvalidArgument("bad")])
async def test_a_listener_that_raises_breaks_one_stream_only(hook: str, error: Exception) -> None:
    first, second, recorder = FakeCall(), FakeCall(), Recorder()
    recorder.fails[hook] = error
    async with linked([first, second], recorder):
        first.incoming.put_nowait("a")
        await until(lambda: recorder.heard.count("connected") == 2)
        second.incoming.put_nowait("b")
        await until(lambda: "b" in recorder.heard)
    assert (InvalidArgument if isinstance(error, InvalidArgument) else Internal) in recorder.heard


async def test_a_frame_that_is_no_protobuf_breaks_the_stream_and_is_no_failure_of_its_owner(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, recorder = FakeCall(), FakeCall(), Recorder()
    async with linked([first, second], recorder):
        first.incoming.put_nowait(None)  # what grpc.aio makes of it
        await until(lambda: recorder.heard == ["connected", InvalidArgument, "connected"])
    assert not caplog.records


async def test_a_stream_that_is_read_while_its_server_stops_is_no_failure_of_its_owner(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def requests() -> AsyncIterator[Any]:
        raise grpc.aio.BaseError("Server already stopped.")
        yield

    class Context:
        async def send_initial_metadata(self, metadata: Any) -> None: ...

        async def write(self, frame: Any) -> None: ...

    context: Any = Context()
    with pytest.raises(Unavailable):
        await multiplexed_stream.serve(requests(), context, SendQueue[Command](), lambda request: None, pack)
    assert not caplog.records


async def test_a_listener_that_raises_on_a_loss_does_not_end_the_link() -> None:
    first, second, recorder = FakeCall(), FakeCall(), Recorder()
    recorder.fails["lost"] = ValueError("bug")
    async with linked([first, second], recorder):
        first.incoming.put_nowait(grpc.aio.EOF)
        await until(lambda: recorder.heard == ["connected", Unavailable, "connected"])


async def test_a_write_that_fails_breaks_the_stream() -> None:
    first, second, recorder = FakeCall(write_error=ResourceExhausted("too large")), FakeCall(), Recorder()
    async with linked([first, second], recorder) as link:
        await until(lambda: link.up)
        link.send(command(1))
        await until(lambda: recorder.heard == ["connected", ResourceExhausted, "connected"])


async def test_dropping_a_stream_reports_it_lost_and_dials_again() -> None:
    first, second, recorder = FakeCall(), FakeCall(), Recorder()
    async with linked([first, second], recorder) as link:
        link.drop()  # harmless while there is no stream
        await until(lambda: link.up)
        link.drop()
        await until(lambda: recorder.heard == ["connected", Unavailable, "connected"])
        assert link.up


async def test_a_link_that_is_cancelled_ends_even_if_its_stream_breaks_at_that_moment() -> None:
    class Breaking(FakeCall):
        async def write(self, request: drafter_pb2.DraftRequest) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise Unavailable("gone") from None

    recorder = Recorder()
    async with linked([Breaking(), FakeCall()], recorder) as link:
        await until(lambda: link.up)
        link.send(command(1))
        await asyncio.sleep(0)
    assert recorder.heard == ["connected"]


async def test_a_peer_that_stops_reading_costs_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SendQueue.__init__, "__defaults__", (3,))
    first, second, recorder = FakeCall(), FakeCall(), Recorder()
    async with linked([first, second], recorder) as link:
        await until(lambda: link.up)
        with pytest.raises(ResourceExhausted):
            for number in range(5):
                link.send(command(number))
        await until(lambda: recorder.heard == ["connected", ResourceExhausted, "connected"])


async def test_failing_thousands_of_times_is_survived() -> None:
    """The backoff once overflowed a float after a thousand failures, which ended the process."""
    calls = [FakeCall(refuses=Unavailable("no")) for _ in range(1200)] + [FakeCall()]
    async with linked(calls, Recorder()) as link:
        link._backoff.most_s = 0.0
        await until(lambda: link.up)


async def test_the_backoff_grows_while_streams_do_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real(0)

    calls = [FakeCall() for _ in range(8)]
    for call in calls[:-1]:
        call.incoming.put_nowait(grpc.aio.EOF)
    left = iter(calls)
    link: MultiplexedStream[Command, drafter_pb2.DraftRequest, Any] = MultiplexedStream(
        lambda: next(left), pack, Recorder(), max_backoff_s=2.0
    )
    monkeypatch.setattr(multiplexed_stream.asyncio, "sleep", sleep)
    running = asyncio.create_task(link.run())
    while len(pauses) < 7:
        await real(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert all(0.5 * 0.05 * 2**n <= pause <= 0.05 * 2**n for n, pause in enumerate(pauses[:5], start=1))
    assert max(pauses) <= 2.0


# The serving end, over gRPC.


class Echo(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers every command with candidates of its session number."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.ended: list[BaseException | None] = []
        self.outboxes: list[SendQueue[types_pb2.Candidates]] = []

    def register(self, server: grpc.aio.Server) -> None:
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, server)

    async def Draft(self, requests: Any, context: Any) -> None:
        outbox = SendQueue[types_pb2.Candidates](self.capacity)
        self.outboxes.append(outbox)

        def receive(request: drafter_pb2.DraftRequest) -> None:
            for item in request.commands:
                if item.session == 666:
                    raise InvalidArgument("a number that nobody likes", reason="UNLIKED")
                if item.session == 667:
                    raise ValueError("secret")
                outbox.put(types_pb2.Candidates(session=item.session))

        ended: BaseException | None = None
        try:
            await multiplexed_stream.serve(
                requests, context, outbox, receive, lambda items: drafter_pb2.DraftResponse(candidates=items)
            )
        except BaseException as error:
            ended = error
            raise
        finally:
            self.ended.append(ended)


class Listening(Recorder):
    def receive(self, frame: Any) -> None:
        self.heard.extend(candidates.session for candidates in frame.candidates)


@asynccontextmanager
async def dialled(address: str, recorder: Recorder) -> AsyncIterator[MultiplexedStream[Any, Any, Any]]:
    async with channel(address) as line:
        stub = drafter_pb2_grpc.DrafterServiceStub(line)
        link: MultiplexedStream[Any, Any, Any] = MultiplexedStream(stub.Draft, pack, recorder, max_backoff_s=0.05)
        running = asyncio.create_task(link.run())
        try:
            yield link
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_link_finds_a_restarted_server_again() -> None:
    echo, recorder = Echo(), Listening()
    server = Server([echo.register])
    address = await server.start(ANY)
    async with dialled(address, recorder) as link:
        await until(lambda: link.up)
        link.send(command(1))
        await until(lambda: 1 in recorder.heard)
        await server.stop(0)
        await until(lambda: not link.up)
        server = Server([echo.register])
        await server.start(address)
        await until(lambda: link.up)
        link.send(command(2))
        await until(lambda: 2 in recorder.heard)
    await server.stop(0)
    assert recorder.heard == ["connected", 1, Unavailable, "connected", 2]


async def test_a_dropped_grpc_stream_is_dialled_again() -> None:
    echo, recorder = Echo(), Listening()
    server = Server([echo.register])
    async with dialled(await server.start("127.0.0.1:0"), recorder) as link:
        await until(lambda: link.up)
        link.drop()
        await until(lambda: recorder.heard == ["connected", Unavailable, "connected"])
        link.send(command(3))
        await until(lambda: 3 in recorder.heard)
    await until(lambda: len(echo.ended) == 2)
    await server.stop(0)


async def test_serving_ends_when_the_peer_half_closes_its_stream() -> None:
    echo = Echo()
    server = Server([echo.register])
    async with channel(await server.start("127.0.0.1:0")) as line:
        call = drafter_pb2_grpc.DrafterServiceStub(line).Draft()
        await call.write(pack([command(7)]))
        await call.done_writing()
        assert [c.session for c in (await call.read()).candidates] == [7]
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    assert echo.ended == [None]
    await server.stop(0)


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [(666, grpc.StatusCode.INVALID_ARGUMENT, "nobody likes"), (667, grpc.StatusCode.INTERNAL, "open the stream again")],
)
async def test_an_error_while_receiving_is_the_streams_status(number: int, code: grpc.StatusCode, text: str) -> None:
    echo = Echo()
    server = Server([echo.register])
    async with channel(await server.start("127.0.0.1:0")) as line:
        call = drafter_pb2_grpc.DrafterServiceStub(line).Draft()
        await call.write(pack([command(number)]))
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
    assert caught.value.code() is code
    assert text in caught.value.details() and "secret" not in caught.value.details()
    await server.stop(0)


async def test_a_caller_that_does_not_read_loses_its_stream() -> None:
    """Neither memory nor sessions may be held for a caller that is stuck."""
    echo = Echo(capacity=100)
    server = Server([echo.register])
    async with channel(await server.start("127.0.0.1:0")) as line:
        call = drafter_pb2_grpc.DrafterServiceStub(line).Draft()
        await call.write(pack([command(1)]))
        await call.read()
        (outbox,) = echo.outboxes
        big = types_pb2.Candidates(token_ids=[1] * 100_000)
        async with asyncio.timeout(60):
            with pytest.raises(ResourceExhausted):
                while True:
                    outbox.put(big)
                    await asyncio.sleep(0)
        await until(lambda: len(echo.ended) == 1)
        assert isinstance(echo.ended[0], ResourceExhausted)
        with pytest.raises(grpc.RpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(0)
