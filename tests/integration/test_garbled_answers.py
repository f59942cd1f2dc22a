"""Answers that are no protobuf: grpc.aio makes None of them, and whoever asked goes on without an answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import typer

from measurement.cli.doctor import doctor
from slipstream.cli.options import expanded
from slipstream.cli.status import status
from slipstream.client.client import RetrySettings, complete
from slipstream.client.completion import Completion
from slipstream.engine.factory import open_engine
from slipstream.errors import InvalidArgument, Unavailable
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import channel
from slipstream.rpc.worker_service import WorkerIdentity, WorkerService
from slipstream.serving.fit import check_fit
from slipstream.v1 import drafter_pb2_grpc, gateway_pb2, gateway_pb2_grpc, verifier_pb2, worker_pb2
from tests.support.fleet import emulated_text, gateway, until, verifier
from tests.support.garbling_peer import garbling
from tests.support.hostile_drafter import HostileDrafter, frame
from tests.support.resumed_completion import resume
from tests.support.scripted_gateway import Setting

PROMPT, TOKENS = [7, 8, 9], 40


def worker(role: worker_pb2.Role = worker_pb2.ROLE_DRAFTER) -> WorkerService:
    model = proto_conversion.model_to_proto(open_engine("emulated:").model)
    return WorkerService(WorkerIdentity(model, role, "model"), worker_pb2.WatchResponse)


def failed(decoded: Any) -> list[tuple[str, int]]:
    return [(event.failure.reason, event.failure.code) for event in decoded.events if event.HasField("failure")]


@pytest.mark.parametrize("method", ["GetModel", "Watch"])
async def test_a_drafter_whose_worker_service_garbles_is_no_more_than_silent(method: str) -> None:
    """Steps are slow enough that it is found silent before the first trial of drafting, some 100 steps after the open:
    while that pauses drafting, nothing is owed."""
    mute = HostileDrafter(lambda *_: [])
    register = partial(drafter_pb2_grpc.add_DrafterServiceServicer_to_server, mute)
    async with (
        garbling(register, worker().register, methods=(method,)) as address,
        verifier(open_engine("emulated:base_ms=20"), silence_s=0.3) as server,
        gateway(server.address) as client,
    ):
        number, decoded = await client.open(PROMPT, tokens=20_000, drafters=[address])
        await until(lambda: bool(failed(decoded)))
        assert (await client.decode(PROMPT, tokens=TOKENS)).token_ids == emulated_text(PROMPT, TOKENS)
        rounds = len(decoded.rounds)
        await until(lambda: len(decoded.rounds) > rounds)
        await client.command(number, close=verifier_pb2.DecodeClose())
        await until(decoded.done.is_set)
    assert {reason for reason, _ in failed(decoded)} - {"LINK_LOST"} == {"SILENT"}


async def test_a_drafter_whose_frames_are_garbled_is_dialled_again(caplog: pytest.LogCaptureFixture) -> None:
    enemy = HostileDrafter(lambda _, command: [frame(command, [1])])
    register = partial(drafter_pb2_grpc.add_DrafterServiceServicer_to_server, enemy)
    async with (
        garbling(register, methods=("Draft",)) as address,
        verifier(open_engine("emulated:base_ms=2")) as server,
        gateway(server.address) as client,
    ):
        number, decoded = await client.open(PROMPT, tokens=20_000, drafters=[address])
        await until(lambda: enemy.streams >= 3)
        assert (await client.decode(PROMPT, tokens=TOKENS)).token_ids == emulated_text(PROMPT, TOKENS)
        await client.command(number, close=verifier_pb2.DecodeClose())
        await until(decoded.done.is_set)
    assert failed(decoded)[0] == ("LINK_LOST", InvalidArgument.code.value[0])
    assert not [record for record in caplog.records if record.name == "slipstream.rpc.multiplexed_stream"]


@pytest.mark.parametrize("method", ["GetModel", "Watch", "Decode"])
async def test_a_gateway_lives_on_beside_a_verifier_that_garbles(setting: Setting, method: str) -> None:
    good, bad = setting.verifier(), setting.verifier()
    bad_worker = WorkerService(WorkerIdentity(good.model, worker_pb2.ROLE_VERIFIER), worker_pb2.WatchResponse)
    front = await setting.front(good)
    async with garbling(bad.register, bad_worker.register, methods=(method,)) as address:
        both = await setting.gateway([*front.addresses, address], front.store)
        async with channel(both.address) as line:
            request = gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=TOKENS)
            texts = await asyncio.gather(*(complete(line, request) for _ in range(8)))
    assert [text.token_ids for text in texts] == [good.script[:TOKENS]] * 8


@pytest.mark.parametrize("method", ["GetModel", "Watch"])
async def test_a_gateway_lives_on_beside_a_drafter_that_garbles(
    setting: Setting, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with garbling(worker().register, methods=(method,)) as address:
        front = await setting.front(setting.verifier(), drafters=(f"model={address}",))
        for _ in range(2):
            assert (await front.generate()).tokens == front.verifiers[0].script[:TOKENS]
        await until(lambda: [record.name for record in caplog.records].count("grpc._common") >= 3)
    complaints = [record for record in caplog.records if address in record.message and record.levelno > logging.DEBUG]
    assert len(complaints) == 1  # however often it was asked


@pytest.mark.parametrize("method", ["GetModel", "Watch"])
async def test_the_doctor_reports_which_worker_sends_garbled_answers(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with garbling(worker().register, methods=(method,)) as address:
        with pytest.raises(typer.Exit):
            await asyncio.to_thread(expanded(doctor), worker=[address])
    assert f"WRONG worker {address}: a message is no protobuf" in capsys.readouterr().out


async def test_serving_does_not_begin_beside_a_worker_that_garbles() -> None:
    async with garbling(worker(worker_pb2.ROLE_VERIFIER).register, methods=("GetModel",)) as address:
        with pytest.raises(InvalidArgument, match="no protobuf"):
            await check_fit(address, [])


class Finisher(gateway_pb2_grpc.GatewayServiceServicer):
    """A gateway that only ever says that a session has ended."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        yield gateway_pb2.GenerateResponse(started=gateway_pb2.Started(session_id="s"))

    async def Resume(self, request: Any, context: Any) -> AsyncIterator[gateway_pb2.ResumeResponse]:
        yield gateway_pb2.ResumeResponse(finished=gateway_pb2.Finished(reason=verifier_pb2.FINISH_REASON_LENGTH))

    async def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse()

    def register(self, server: Any) -> None:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self, server)


async def test_a_client_that_receives_a_garbled_answer_resumes_on_another_gateway() -> None:
    async with (
        garbling(Finisher().register, methods=("Generate", "Resume")) as bad,
        garbling(Finisher().register, methods=()) as good,
        channel(bad) as first,
        channel(good) as second,
    ):
        with pytest.raises(Unavailable, match="no protobuf"):
            await complete(first, gateway_pb2.GenerateRequest())
        begun = Completion(started=gateway_pb2.Started(session_id="s"))
        await resume([second, first], begun, retry=RetrySettings(resume_s=10.0))
    assert begun.finished.reason == verifier_pb2.FINISH_REASON_LENGTH


async def test_a_command_that_receives_a_garbled_answer_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    async with garbling(Finisher().register, methods=("ListModels",)) as address:
        with pytest.raises(typer.Exit):
            await asyncio.to_thread(expanded(status), server=[address])
    assert "slipstream status: a message is no protobuf" in capsys.readouterr().err
