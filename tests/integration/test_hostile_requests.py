"""Every field of every request message set to what nobody should send: a typed answer, and the service goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, running
from slipstream.engine.factory import open_engine
from slipstream.errors import SlipstreamError
from slipstream.rpc import proto_conversion
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import drafter_pb2, gateway_pb2, verifier_pb2, worker_pb2
from tests.support.fleet import drafter, emulated_text, opening, verifier
from tests.support.hostile_values import hostile, messages
from tests.support.scripted_verifier import ScriptedVerifier, served
from tests.support.toy_tokenizer import toy_model, toy_tokenizer

UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
"""So that it is the service's own limits that hold."""
TYPED = {kind.code for kind in SlipstreamError.__subclasses__()} - {grpc.StatusCode.INTERNAL}
MOST_WORDS = 1100
PROMPT, TOKENS, LAST = [7, 8, 9], 6, 4_000_000_000
GOOD = gateway_pb2.GenerateRequest(
    prompt="Tell me.", max_tokens=8, sampling=gateway_pb2.SamplingOptions(temperature=1.0, seed=1)
)
BASES: dict[str, Any] = {
    "GenerateRequest": GOOD,
    "TokenizeRequest": gateway_pb2.TokenizeRequest(text="x"),
    "GetSessionRequest": gateway_pb2.GetSessionRequest(session_id="x"),
    "CancelRequest": gateway_pb2.CancelRequest(session_id="x"),
}
"""Good requests to change one field of; of other kinds an empty one."""


TRACE = {"open.trace.trace_id", "open.trace.receiver"}
"""What tells of no trace that could be is let be."""
UNREAD = {
    "gateway": {"owner", "revision", "vocabulary_fingerprint"},
    "verifier": TRACE,
    "drafter": TRACE
    | {
        "open.key.id",
        "open.target.name",
        "open.target.arithmetic",
        "open.target.forward_path",
        "open.target.forward_notice",
        "open.target.revision",
        "open.target.dtype",
        "open.target.eos_token_ids",
        "open.target.chat_template_fingerprint",
    },
}
"""Fields that a service does not look at, so that their size is bounded by the message's alone."""


def fits(label: str, service: str) -> bool:
    """Whether a hostile value need not be refused: all that are too many or too long must be."""
    name, _, kind = label.partition(": ")
    return kind not in ("many", "long") or name in UNREAD[service]


def methods(file: Any) -> dict[str, MethodDescriptor]:
    """`/service/Method` -> descriptor, of all services of a file."""
    return {
        f"/{service.full_name}/{method.name}": method
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


GATEWAY_METHODS = methods(gateway_pb2)
STREAMS = {"verifier": methods(verifier_pb2), "drafter": methods(drafter_pb2)}


@asynccontextmanager
async def front(folder: Path) -> AsyncIterator[str]:
    """The address of a gateway on a scripted verifier."""
    model = toy_model(toy_tokenizer(folder))
    (folder / "chat_template.jinja").write_text(
        "{% for each in messages %}{{ each.role }} {{ each.content }}{% endfor %}"
    )
    async with served(ScriptedVerifier(model, [65, 66, 67] * 100)) as (address, _):
        config = GatewayConfig(
            verifiers=(address,), tokenizer=str(folder), listen="127.0.0.1:0", grace_s=0.0, rehoming_wait_s=2.0
        )
        async with running(config, GatewayDependencies(random.Random(7).getrandbits)) as gateway:
            await gateway.ready()
            yield gateway.address


@asynccontextmanager
async def worker(role: str) -> AsyncIterator[str]:
    async with AsyncExitStack() as stack:
        engine = open_engine("emulated:vocabulary=256", kv_tokens=1 << 15)
        if role == "drafter":
            yield await stack.enter_async_context(drafter(engine))
        else:
            yield (await stack.enter_async_context(verifier(engine))).address


def check_told(code: grpc.StatusCode, details: str) -> None:
    assert code in TYPED, (code, details[:200])
    assert len(details.encode()) < MOST_WORDS


async def ask(line: grpc.aio.Channel, path: str, request: bytes) -> bool:
    """One call of a method, to its end. What it says is a typed status or none; whether it was refused."""
    method = GATEWAY_METHODS[path]
    try:
        async with asyncio.timeout(60):
            if method.server_streaming:
                async for _ in line.unary_stream(path)(request):
                    pass
            else:
                await line.unary_unary(path)(request)
    except grpc.aio.AioRpcError as error:
        check_told(error.code(), error.details() or "")
        return True
    return False


async def check_serves(line: grpc.aio.Channel) -> None:
    """A good request is answered whole."""
    events = [
        gateway_pb2.GenerateResponse.FromString(event)
        async for event in line.unary_stream("/slipstream.v1.GatewayService/Generate")(GOOD.SerializeToString())
    ]
    assert sum(len(event.delta.token_ids) for event in events) == 8 and events[-1].HasField("finished")


@pytest.mark.parametrize("path", GATEWAY_METHODS)
async def test_no_field_of_a_clients_request_gets_more_than_a_typed_answer(tmp_path: Path, path: str) -> None:
    asked = GATEWAY_METHODS[path].input_type
    async with front(tmp_path) as address, grpc.aio.insecure_channel(address, UNLIMITED) as line:
        for label, change in hostile(asked):
            request = asked._concrete_class()
            if asked.name in BASES:
                request.CopyFrom(BASES[asked.name])
            change(request)
            refused = await ask(line, path, request.SerializeToString())
            assert refused or fits(label, "gateway"), label
        await check_serves(line)


# Streams: a frame, then a session that must be served all the same, on the same stream or, if it broke, on another.


def good_open(role: str) -> Any:
    open_ = opening(PROMPT, tokens=TOKENS)
    if role == "verifier":
        return open_
    return drafter_pb2.DraftOpen(
        key=open_.key,
        prefix=open_.prefix,
        sampling=proto_conversion.sampling_to_proto(SamplingParams(temperature=0.0)),
        target=proto_conversion.model_to_proto(open_engine("emulated:vocabulary=256").model),
        policy=drafter_pb2.DraftPolicy(max_nodes=8),
        max_length=100,
    )


def frame(role: str, *commands: tuple[int, int, dict[str, Any]]) -> Any:
    """Of (session, epoch, command)."""
    pack, one = FRAMES[role]
    return pack(commands=[one(session=number, epoch=epoch, **command) for number, epoch, command in commands])


FRAMES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "verifier": (verifier_pb2.DecodeRequest, verifier_pb2.DecodeCommand),
    "drafter": (drafter_pb2.DraftRequest, drafter_pb2.DraftCommand),
}
ANSWERS = {"verifier": verifier_pb2.DecodeResponse, "drafter": drafter_pb2.DraftResponse}


async def say(address: str, role: str, said: Iterable[bytes]) -> bool:
    """Frames on a stream of their own, the last session's among them. Every answer is typed, and the last session is
    served on this stream unless that was broken off for a reason that is told. Whether anything was refused."""
    (path,) = STREAMS[role]
    last = frame(role, (LAST, 1, {"open": _named(good_open(role))})).SerializeToString()
    async with grpc.aio.insecure_channel(address, UNLIMITED) as line:
        call = line.stream_stream(path)()
        try:
            async with asyncio.timeout(60):
                for message in (*said, last):
                    await call.write(message)
                return await listen(call, role)
        except asyncio.InvalidStateError:
            check_told(await call.code(), await call.details() or "")
        except grpc.aio.AioRpcError as error:
            # A write on a stream that breaks meanwhile knows no more than that it broke.
            code = await call.code()
            if code is not grpc.StatusCode.INTERNAL or "Internal error from Core" not in str(error):
                check_told(code, await call.details() or "")
        finally:
            call.cancel()
        return True


def _named(open_: Any) -> Any:
    open_.key.id = "the last one"
    return open_


async def listen(call: Any, role: str) -> bool:
    """Until the last session is served as it should be; failures of others are typed. Whether there were any."""
    tokens: list[int] = []
    refused = False
    while (message := await call.read()) is not grpc.aio.EOF:
        answer = ANSWERS[role].FromString(message)
        for end in answer.ends if role == "verifier" else answer.refusals:
            failure = end.failure
            assert end.session != LAST or not failure.code, failure
            if failure.code:
                refused = True
                check_told(next(code for code in grpc.StatusCode if code.value[0] == failure.code), failure.message)
        for part in answer.rounds if role == "verifier" else answer.candidates:
            if part.session == LAST:
                tokens += part.token_ids
        if len(tokens) >= TOKENS:
            assert tokens[:TOKENS] == emulated_text(PROMPT, TOKENS)
            return refused
    raise AssertionError("the stream ended without a status")


def provocations(role: str) -> Iterable[tuple[str, list[bytes]]]:
    """Each field of each command of a stream, changed in a command that was good, for a session that is open."""
    (method,) = STREAMS[role].values()
    for label, change in hostile(method.input_type, depth=0):
        whole = method.input_type._concrete_class()
        change(whole)
        yield label, [whole.SerializeToString()]
    command = method.input_type.fields_by_name["commands"].message_type
    waiting = good_open(role)
    if role == "verifier":
        waiting.credit = 1  # a text that were over would hear of no command
    first = frame(role, (1, 1, {"open": waiting})).SerializeToString()
    for field in command.oneofs_by_name["command"].fields:
        kind: Descriptor = field.message_type
        base = good_open(role) if field.name == "open" else kind._concrete_class()
        for label, change in hostile(kind):
            changed = kind._concrete_class()
            changed.CopyFrom(base)
            change(changed)
            number = 2 if field.name == "open" else 1
            if field.name == "open":
                changed.key.id = changed.key.id if label.startswith("key") else "another"
            epoch = 1 if field.name == "open" else 2
            said = frame(role, (number, epoch, {field.name: changed})).SerializeToString()
            yield f"{field.name}.{label}", [first, said]


@pytest.mark.parametrize("role", STREAMS)
async def test_no_field_of_a_workers_command_gets_more_than_a_typed_answer(role: str) -> None:
    async with worker(role) as address:
        for label, said in provocations(role):
            refused = await say(address, role, said)
            assert refused or fits(label, role), label
        assert not await say(address, role, [])


# Random messages and random bytes.

EXAMPLES = [40, pytest.param(1500, marks=pytest.mark.slow)]
HARMLESS = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


async def fuzz(attack: Callable[[Any], Awaitable[object]], strategy: st.SearchStrategy[Any], examples: int) -> None:
    """Hypothesis is no coroutine: it draws on a thread of its own, and this loop makes the calls. The short run is the
    same every time."""
    loop = asyncio.get_running_loop()  # whose own use of `random` Hypothesis takes for the strategies'

    @settings(max_examples=examples, deadline=None, database=None, derandomize=examples < 100)
    @given(strategy)
    def run(example: Any) -> None:
        asyncio.run_coroutine_threadsafe(attack(example), loop).result(60)

    await asyncio.to_thread(run)


def random_bytes(message: Descriptor) -> st.SearchStrategy[bytes]:
    return messages(message).map(lambda made: made.SerializeToString()) | st.binary(max_size=64)


@HARMLESS
@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", EXAMPLES)
async def test_random_requests_of_clients_get_typed_answers(tmp_path: Path, examples: int) -> None:
    calls = st.sampled_from(sorted(GATEWAY_METHODS)).flatmap(
        lambda path: st.tuples(st.just(path), random_bytes(GATEWAY_METHODS[path].input_type))
    )
    async with front(tmp_path) as address, grpc.aio.insecure_channel(address, UNLIMITED) as line:
        await fuzz(lambda call: ask(line, *call), calls, examples)
        await check_serves(line)


def conversations(role: str) -> st.SearchStrategy[list[bytes]]:
    """A few frames of commands for a few sessions, opened rightly as often as not, and now and then no protobuf."""
    (method,) = STREAMS[role].values()
    kinds = method.input_type.fields_by_name["commands"].message_type.oneofs_by_name["command"].fields
    good = st.just(("open", good_open(role)))
    odd = st.sampled_from(list(kinds)).flatmap(lambda kind: st.tuples(st.just(kind.name), messages(kind.message_type)))
    command = st.tuples(st.integers(1, 3), st.integers(0, 3), (good | odd).map(lambda said: dict([said])))
    frames = st.lists(command, max_size=4).map(lambda said: frame(role, *said).SerializeToString())
    return st.lists(frames | frames | random_bytes(method.input_type), max_size=4)


@HARMLESS
@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("role", STREAMS)
async def test_random_commands_of_workers_get_typed_answers(role: str, examples: int) -> None:
    async with worker(role) as address:
        await fuzz(lambda said: say(address, role, said), conversations(role), examples)


def test_the_one_service_that_is_not_attacked_takes_nothing() -> None:
    for path, method in methods(worker_pb2).items():
        assert not method.input_type.fields, path
