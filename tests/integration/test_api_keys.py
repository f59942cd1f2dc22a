"""A gateway with API keys, over real gRPC: who gets in, what they see of each other, what they may use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from gateway.auth.api_keys import ApiKeys
from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, running
from gateway.routing.verifier_session import SessionEnded
from gateway.sessions import registry
from gateway.sessions.arithmetic_spans import moves_of
from slipstream.cli.commands import app
from slipstream.client.async_client import AsyncClient
from slipstream.client.client import complete
from slipstream.client.gateway_endpoint import GatewayEndpoint, digest, new_key
from slipstream.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SlipstreamError,
    Unauthenticated,
    Unavailable,
)
from slipstream.rpc.channel import channel, error_of
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc
from slipstream.v1.verifier_pb2 import FINISH_REASON_ERROR
from tests.support.certificates import Authority
from tests.support.fleet import until
from tests.support.scripted_verifier import ScriptedVerifier, served
from tests.support.toy_tokenizer import toy_model, toy_tokenizer

ALICE, BOB = new_key(), new_key()
METHODS = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].methods


class Place:
    """A gateway with the keys of Alice and Bob, and a verifier whose sessions never end by themselves."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self.keys = folder / "keys.toml"
        self.clock = 1000.0
        self.verifier = ScriptedVerifier(toy_model(folder), [65] * 150)
        self.address = ""
        self.write(alice="", bob="")

    def write(self, **limits: str) -> None:
        keys = {"alice": ALICE, "bob": BOB}
        lines = [f'{name} = {{ sha256 = "{digest(keys[name]).hex()}" {more} }}\n' for name, more in limits.items()]
        fresh = self.folder / "fresh.toml"
        fresh.write_text("".join(lines))
        fresh.rename(self.keys)

    async def start(self, **settings: Any) -> None:
        address, _ = await self._stack.enter_async_context(served(self.verifier))
        config = GatewayConfig(
            verifiers=(address,),
            tokenizer=str(self.folder),
            listen="127.0.0.1:0",
            api_keys=str(self.keys),
            grace_s=0.0,
            **settings,
        )
        world = GatewayDependencies(random.SystemRandom().getrandbits, clock=lambda: self.clock)
        gateway = await self._stack.enter_async_context(running(config, world))
        await gateway.ready()
        self.address, self.sessions = gateway.address, gateway.sessions

    async def stub(self, key: str, **options: Any) -> Any:
        line = await self._stack.enter_async_context(GatewayEndpoint(self.address, key, **options).channel())
        return gateway_pb2_grpc.GatewayServiceStub(line)

    async def generate(self, key: str, **request: Any) -> Any:
        async with GatewayEndpoint(self.address, key).channel() as line:
            asked = {"prompt": "Tell me.", "max_tokens": 20} | request
            return await complete(line, gateway_pb2.GenerateRequest(**asked))


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    toy_tokenizer(tmp_path)
    async with AsyncExitStack() as stack:
        yield Place(tmp_path, stack)


async def failure(call: Any) -> SlipstreamError:
    with pytest.raises(grpc.RpcError) as refusal:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        await call
    return error_of(refusal.value)


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer "),),
        (("authorization", f"Bearer {new_key()}"),),
        (("authorization", ALICE),),
        (("authorization", f"Basic {ALICE}"),),
        (("authorization", f"Bearer {ALICE}x"),),
        (("authorization", f"Bearer {digest(ALICE).hex()}"),),
        (("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {BOB}")),
        (("authorization", "Bearer " + "x" * 4000),),
        (("x-api-key", ALICE),),
    ],
)
async def test_without_a_known_key_every_method_but_health_is_closed(place: Place, metadata: Any) -> None:
    await place.start()
    said = set()
    async with channel(place.address) as line:
        stub = gateway_pb2_grpc.GatewayServiceStub(line)
        for method in METHODS:
            request = getattr(gateway_pb2, method.input_type.name)()
            error = await failure(getattr(stub, method.name)(request, metadata=metadata))
            assert isinstance(error, Unauthenticated)
            said.add(error.message)
        health = health_pb2_grpc.HealthStub(line)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    assert len(said) == 1 and not place.verifier.commands


async def test_no_key_can_reach_or_detect_the_sessions_of_another_key(place: Place) -> None:
    place.verifier.limit = 5
    await place.start()
    alice, bob = await place.stub(ALICE), await place.stub(BOB)
    stream = alice.Generate(gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=100))
    session = (await stream.read()).started.session_id
    asked = gateway_pb2.GetSessionRequest(session_id=session)
    assert (await alice.GetSession(asked)).key.id == session
    nobodys = "f" * len(session)
    for name in ("GetSession", "Cancel"):
        kind = getattr(gateway_pb2, f"{name}Request")
        theirs = await failure(getattr(bob, name)(kind(session_id=session)))
        absent = await failure(getattr(bob, name)(kind(session_id=nobodys)))
        assert isinstance(theirs, NotFound) and theirs.reason == absent.reason
        assert theirs.message.replace(session, nobodys) == absent.message
    assert not stream.done()
    await alice.Cancel(gateway_pb2.CancelRequest(session_id=session))
    while (event := await stream.read()) is not grpc.aio.EOF:
        last = event
    assert last.HasField("finished")
    assert isinstance(await failure(bob.GetSession(asked)), NotFound)  # nor once it has ended
    assert (await alice.GetSession(asked)).finish_reason


async def test_no_two_keys_share_a_prefix_whatever_salt_they_ask_for(place: Place) -> None:
    await place.start()
    for key in (ALICE, BOB):
        for salt in ("", "same", "same"):
            await place.generate(key, cache_salt=salt)
    salts = [opened.cache_salt for opened in place.verifier.opens()]
    assert len(set(salts)) == 4 and salts[1] == salts[2] and salts[4] == salts[5]
    alice, bob = {opened.tenant for opened in place.verifier.opens()[:3]}, {place.verifier.opens()[3].tenant}
    assert len(alice) == len(bob) == 1 and alice != bob and all({*alice, *bob})


async def test_rate_limits_of_one_key_carry_a_retry_delay_and_leave_other_keys_alone(place: Place) -> None:
    place.write(alice=", tokens_per_minute = 60, requests_per_minute = 4", bob="")
    await place.start()
    await place.generate(ALICE, max_tokens=40)  # 8 of the prompt, and 40
    with pytest.raises(ResourceExhausted) as refusal:
        await place.generate(ALICE, max_tokens=40)
    assert refusal.value.reason == "KEY_TOKENS" and refusal.value.retry_s == pytest.approx(36.0, abs=0.01)
    place.clock += 36.0
    await place.generate(ALICE, max_tokens=40)
    await place.generate(BOB, max_tokens=40)
    for _ in range(3):
        with pytest.raises(ResourceExhausted):
            await place.generate(ALICE, max_tokens=40)
    with pytest.raises(ResourceExhausted) as refusal:
        await place.generate(ALICE, max_tokens=1)
    assert refusal.value.reason == "KEY_REQUESTS" and refusal.value.retry_s == pytest.approx(15.0, abs=10.0)
    await place.generate(BOB, max_tokens=40)


async def test_a_rollback_is_charged_for_what_it_stores_and_has_computed_again(place: Place) -> None:
    place.write(alice=", tokens_per_minute = 120", bob="")
    await place.start()
    session = (await place.generate(ALICE, max_tokens=20)).session_id  # 8 of the prompt, and 20
    alice = await place.stub(ALICE)
    edit = gateway_pb2.TokenIds(token_ids=[65] * 5)
    asked = {"session_id": session, "output_tokens": 10, "token_ids": edit}
    for branch in (False, True, True, True):  # 8 + 10 + 5 tokens each
        await alice.Rollback(gateway_pb2.RollbackRequest(**asked, branch=branch))
    for branch in (False, True):
        error = await failure(alice.Rollback(gateway_pb2.RollbackRequest(**asked, branch=branch)))
        assert isinstance(error, ResourceExhausted) and error.reason == "KEY_TOKENS"
        assert error.retry_s == pytest.approx(11.5, abs=0.01)  # 120 - 28 - 4 * 23 = 0 are left
    place.clock += 11.5
    await alice.Rollback(gateway_pb2.RollbackRequest(**asked, branch=True))


async def test_a_key_pays_for_tokens_that_repeated_resumes_compute_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = await few_free_epochs(place, monkeypatch, tokens_per_minute=108)
    session = await left(place, alice.Generate(gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=20)))
    resumed = gateway_pb2.ResumeRequest(session_id=session)
    for _ in range(6):  # 8 of the prompt and 12 of the output: for the first run, and for each but two of these
        await left(place, alice.Resume(resumed))
    error = await failure(alice.Resume(resumed, timeout=60))
    assert isinstance(error, ResourceExhausted) and error.reason == "KEY_TOKENS"
    assert error.retry_s == pytest.approx(60 / 108 * (20 * 5 + 28 - 108), abs=0.01)
    place.clock += error.retry_s
    await left(place, alice.Resume(resumed))


async def test_moves_to_other_verifiers_are_not_charged_to_the_client(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = await few_free_epochs(place, monkeypatch, tokens_per_minute=40)
    call = alice.Generate(gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=20))
    session = (await call.read()).started.session_id
    for moves in range(1, 6):
        await until(lambda moves=moves: len(place.verifier.opens()) == moves)  # type: ignore[misc]
        run = place.sessions._entries[session].run
        assert run is not None and run._verifier_session is not None
        run._verifier_session.end(SessionEnded(FINISH_REASON_ERROR, Unavailable("lost"), blame=0.0))
    await until(lambda: len(place.verifier.opens()) == 6)
    await left(place, call)
    record = await place.sessions._ownership.store.read(session)
    assert (record.epoch, moves_of(record.params)) == (6, 5)
    # 40 less 8 of the prompt and 12 of the output leave 20: enough for the rest, and not for the text once more.
    resumed = alice.Resume(gateway_pb2.ResumeRequest(session_id=session))
    await left(place, resumed)
    await alice.Rollback(gateway_pb2.RollbackRequest(session_id=session, output_tokens=0))
    assert moves_of((await place.sessions._ownership.store.read(session)).params) == 5


async def few_free_epochs(place: Place, monkeypatch: pytest.MonkeyPatch, tokens_per_minute: int) -> Any:
    """Alice's stub, where two epochs of a session are free and a verifier sends 12 tokens of it."""
    monkeypatch.setattr(registry, "FREE_EPOCHS", 2)
    place.verifier.limit = 12
    place.write(alice=f", tokens_per_minute = {tokens_per_minute}", bob="")
    await place.start()
    return await place.stub(ALICE)


async def left(place: Place, call: Any) -> str:
    """The session of a call that is cancelled once 12 tokens came, when nothing of it runs any more."""
    tokens, session = 0, ""
    while tokens < 12:
        event = await call.read()
        session = event.started.session_id or session
        tokens += len(event.delta.token_ids)
    call.cancel()
    await until(lambda: not place.sessions.open_sessions)
    return session


async def test_a_rollback_that_is_refused_costs_no_tokens(place: Place) -> None:
    place.write(alice=", tokens_per_minute = 50", bob="")
    await place.start()
    session = (await place.generate(ALICE, max_tokens=20)).session_id
    alice = await place.stub(ALICE)
    wrong = gateway_pb2.TokenIds(token_ids=[10_000])
    for _ in range(5):
        error = await failure(
            alice.Rollback(gateway_pb2.RollbackRequest(session_id=session, output_tokens=4, token_ids=wrong))
        )
        assert isinstance(error, InvalidArgument)
    await alice.Rollback(gateway_pb2.RollbackRequest(session_id=session, output_tokens=14))  # 22 of 22


async def test_edits_count_towards_the_prompt_limit_of_a_key(place: Place) -> None:
    place.write(alice=", prompt_tokens = 12, max_tokens = 20", bob="")
    await place.start()
    session = (await place.generate(ALICE, max_tokens=20)).session_id  # 8 tokens of prompt
    alice = await place.stub(ALICE)

    def rollback(keep: int, edit: int, **change: Any) -> Any:
        tokens = gateway_pb2.TokenIds(token_ids=[65] * edit)
        return alice.Rollback(
            gateway_pb2.RollbackRequest(session_id=session, output_tokens=keep, token_ids=tokens, **change)
        )

    error = await failure(rollback(10, 5))
    assert isinstance(error, InvalidArgument) and error.reason == "KEY_PROMPT"
    assert (await failure(rollback(10, 1, max_tokens=21))).reason == "KEY_OUTPUT"
    await rollback(10, 3)
    for keep in (13, 3):  # what was written before counts, as far as it may still be there
        assert (await failure(rollback(keep, 2))).reason == "KEY_PROMPT"
    await rollback(13, 1)
    await rollback(0, 4)


async def test_several_gateways_on_one_store_allow_what_one_would(place: Place, redis_url: str) -> None:
    place.write(alice=", tokens_per_minute = 60, sessions = 1", bob=", requests_per_minute = 3")
    await place.start(store=redis_url)
    first = place.address
    await place.generate(ALICE, max_tokens=40)
    await place.start(store=redis_url)
    assert place.address != first
    with pytest.raises(ResourceExhausted) as refusal:
        await place.generate(ALICE, max_tokens=40)
    assert refusal.value.reason == "KEY_TOKENS"
    for address in (first, place.address, first):
        place.address = address
        await (await place.stub(BOB)).ListModels(gateway_pb2.ListModelsRequest())
    error = await failure((await place.stub(BOB)).ListModels(gateway_pb2.ListModelsRequest()))
    assert error.reason == "KEY_REQUESTS"


async def test_requests_that_a_key_may_never_send_are_refused(place: Place) -> None:
    place.write(alice=", prompt_tokens = 10, max_tokens = 5, least_priority = 3", bob=", least_priority = -2")
    await place.start()
    with pytest.raises(InvalidArgument, match="may send 10"):
        await place.generate(ALICE, prompt="x" * 11, max_tokens=5, priority=3)
    with pytest.raises(InvalidArgument, match="may ask for 5"):
        await place.generate(ALICE, max_tokens=6, priority=3)
    with pytest.raises(PermissionDenied):
        await place.generate(ALICE, max_tokens=5, priority=2)
    assert len((await place.generate(ALICE, max_tokens=5, priority=3)).token_ids) == 5
    assert len((await place.generate(BOB, max_tokens=20, priority=-2)).token_ids) == 20


async def test_a_session_that_ends_however_it_ends_gives_its_room_back(place: Place) -> None:
    place.write(alice=", sessions = 1", bob="")
    place.verifier.limit = 5
    await place.start()
    alice = await place.stub(ALICE)
    for _ in range(3):
        stream = alice.Generate(gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=100))
        await stream.read()
        with pytest.raises(ResourceExhausted) as refusal:
            await place.generate(ALICE)
        assert refusal.value.reason == "KEY_SESSIONS"
        stream.cancel()
        async with asyncio.timeout(60):
            while place.verifier.sessions:
                await asyncio.sleep(0.01)
    place.verifier.limit = None
    await place.generate(ALICE)


async def test_keys_come_and_go_while_the_gateway_runs(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    await place.start()
    await place.generate(BOB)
    place.write(alice="")
    with pytest.raises(Unauthenticated):
        await place.generate(BOB)
    await place.generate(ALICE)
    place.keys.write_text("alice = nonsense")
    await place.generate(ALICE)
    assert "the former API keys stay" in caplog.text
    place.keys.unlink()
    await place.generate(ALICE)
    place.write(bob="")
    await place.generate(BOB)
    with pytest.raises(Unauthenticated):
        await place.generate(ALICE)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("", None),
        ('a = { sha256 = "12" }', "no sha256"),
        ("a = 5", "no sha256"),
        (f'a = {{ sha256 = "{"0" * 64}", session = 5 }}', "no such limit: session"),
        (f'a = {{ sha256 = "{"0" * 64}", sessions = 0 }}', "sessions must be"),
        (f'a = {{ sha256 = "{"0" * 64}", sessions = true }}', "sessions must be"),
        (f'a = {{ sha256 = "{"0" * 64}" }}\nb = {{ sha256 = "{"0" * 64}" }}', "the same"),
        (f'"a b" = {{ sha256 = "{"0" * 64}" }}', "name"),
        ("a = {", "cannot be read"),
    ],
)
def test_a_file_of_keys_that_is_wrong_stops_the_start_with_its_fault(
    tmp_path: Path, line: str, fault: str | None
) -> None:
    (tmp_path / "keys").write_text(line)
    if fault is None:
        ApiKeys(str(tmp_path / "keys"))
        return
    with pytest.raises(InvalidArgument, match=fault):
        ApiKeys(str(tmp_path / "keys"))


async def test_the_command_makes_a_key_that_opens(place: Place) -> None:
    made = CliRunner().invoke(app, ["key", "carol", "--sessions", "2", "--least-priority", "-1"])
    assert made.exit_code == 0
    place.keys.write_text(made.stdout)
    await place.start()
    assert "least_priority = -1" in made.stdout and made.stderr.strip() not in made.stdout
    assert (await place.generate(made.stderr.strip(), priority=-1)).token_ids


async def test_clients_come_in_by_tls_and_a_key_never_travels_in_plaintext(place: Place, tmp_path: Path) -> None:
    folder = Authority().issue(tmp_path / "tls", "localhost")
    (folder / "ca.crt").rename(tmp_path / "ca.pem")
    await place.start(tls_folder=str(folder))
    place.address = place.address.replace("127.0.0.1", "localhost")
    stub = await place.stub(ALICE, ca=str(tmp_path / "ca.pem"))
    assert (await stub.ListModels(gateway_pb2.ListModelsRequest())).models
    forwarded = place.address.replace("localhost", "127.0.0.1")
    for name, reached in (("localhost", True), ("", False), ("gateway.example", False)):
        async with GatewayEndpoint(forwarded, ALICE, ca=str(tmp_path / "ca.pem"), server_name=name).channel() as line:
            asked = gateway_pb2_grpc.GatewayServiceStub(line).ListModels(gateway_pb2.ListModelsRequest())
            assert (await asked).models if reached else (await failure(asked)).reason == "HANDSHAKE"
    async with channel(place.address) as line:
        plain = gateway_pb2_grpc.GatewayServiceStub(line)
        assert (await failure(plain.ListModels(gateway_pb2.ListModelsRequest()))).reason == "HANDSHAKE"
    for elsewhere in ("gateway.example:50051", "127.0.0.1.example:50051", "localhost.example:50051", "10.0.0.1:1"):
        with pytest.raises(FailedPrecondition, match="plaintext"):
            GatewayEndpoint(elsewhere, ALICE).channel()
    with pytest.raises(InvalidArgument, match="one line"):
        GatewayEndpoint(place.address, ALICE + "\n").channel()
    assert ALICE not in repr(GatewayEndpoint("gateway.example:50051", ALICE))


async def test_a_key_travels_in_plaintext_where_that_is_asked_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the library, the command and the environment. Written by scheme, an address is nobody's own."""
    await place.start()
    place.address = f"ipv4:{place.address}"
    words = ["generate", "Tell me.", "--max-tokens", "20", "--server", place.address, "--api-key", ALICE]

    async def command(*more: str) -> int:
        return (await asyncio.to_thread(CliRunner().invoke, app, [*words, *more])).exit_code

    with pytest.raises(FailedPrecondition, match="--plaintext-key"):
        await place.generate(ALICE)
    assert await command() != 0
    assert await command("--plaintext-key") == 0
    async with AsyncClient(place.address, api_key=ALICE, plaintext_key=True) as client:
        assert await client.models()
    monkeypatch.setenv("SLIPSTREAM_PLAINTEXT_KEY", "true")
    assert (await place.generate(ALICE)).token_ids
    assert await command() == 0
    async with AsyncClient(place.address, api_key=ALICE) as client:
        assert await client.models()
    async with AsyncClient(place.address, api_key=ALICE, plaintext_key=False) as client:
        with pytest.raises(FailedPrecondition, match="--plaintext-key"):
            await client.models()
    monkeypatch.setenv("SLIPSTREAM_PLAINTEXT_KEY", "perhaps")
    with pytest.raises(InvalidArgument, match="SLIPSTREAM_PLAINTEXT_KEY"):
        GatewayEndpoint(place.address, ALICE)


async def test_too_many_wrong_keys_delay_further_attempts_and_valid_keys_still_work(place: Place) -> None:
    await place.start(failed_keys_per_minute=3)
    stranger = await place.stub(new_key())
    asked = gateway_pb2.ListModelsRequest()
    for _ in range(3):
        assert isinstance(await failure(stranger.ListModels(asked)), Unauthenticated)
    refusal = await failure(stranger.ListModels(asked))
    assert isinstance(refusal, ResourceExhausted) and refusal.reason == "KEY_ATTEMPTS"
    assert refusal.retry_s == pytest.approx(20.0)
    assert (await (await place.stub(ALICE)).ListModels(asked)).models
    place.clock += 20.0
    assert isinstance(await failure(stranger.ListModels(asked)), Unauthenticated)


async def test_a_key_with_most_sessions_leaves_some_to_others(place: Place) -> None:
    """Whatever the operator allows it: other keys' requests find a session free."""
    await place.start(max_sessions=16)
    place.verifier.limit = 1
    stub = await place.stub(ALICE)
    asked = gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=20)
    calls = [stub.Generate(asked) for _ in range(14)]
    for call in calls:
        await call.read()
    refused = await failure(stub.Generate(asked))
    assert (type(refused), refused.reason) == (ResourceExhausted, "SESSIONS")
    theirs = (await place.stub(BOB)).Generate(asked)
    assert await theirs.read() is not grpc.aio.EOF
    place.verifier.limit = None


async def test_a_rule_may_be_one_keys_alone(place: Place) -> None:
    """It holds by whoever calls, not by what the request says."""
    place.write(alice="", bob="")
    await place.start(rules="key=alice: off; key=bob: max_draft_tokens=3")
    await place.generate(ALICE, workload="bob")
    await place.generate(BOB, workload="alice")
    assert [opened.policy.max_draft_tokens for opened in place.verifier.opens()] == [0, 3]
