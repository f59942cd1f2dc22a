"""Certificates between roles: who gets in, who is told what, and what a change of the files does."""

from __future__ import annotations

import asyncio
import datetime
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.routing.worker_watch import WorkerWatch
from slipstream.errors import InvalidArgument, PermissionDenied, SlipstreamError, Unavailable
from slipstream.rpc import DRAFTER, GATEWAY, VERIFIER
from slipstream.rpc.channel import HANDSHAKE, channel, dialer, error_of
from slipstream.rpc.server import ALLOWED_ROLES, HEALTH, Server, role_access
from slipstream.rpc.tls import Certificates, certificates_from_env
from slipstream.rpc.worker_service import WorkerIdentity, WorkerService
from slipstream.v1 import (
    drafter_pb2,
    drafter_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    types_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.certificates import Authority
from tests.support.fleet import until

ROLES = (DRAFTER, VERIFIER, GATEWAY)


class Everything(
    drafter_pb2_grpc.DrafterServiceServicer,
    verifier_pb2_grpc.VerifierServiceServicer,
    gateway_pb2_grpc.GatewayServiceServicer,
):
    """Every stream answers once, so that a call that gets in is told from one that does not."""

    def register(self, server: grpc.aio.Server) -> None:
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, server)
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self, server)

    async def Draft(self, requests: Any, context: Any) -> None:
        await context.write(drafter_pb2.DraftResponse())

    async def Decode(self, requests: Any, context: Any) -> AsyncIterator[verifier_pb2.DecodeResponse]:
        yield verifier_pb2.DecodeResponse()

    async def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def folders(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One for each role, one for a stranger, one of a role by another authority, one that has expired."""
    place = tmp_path_factory.mktemp("tls")
    made = {role: authority.issue(place / role, f"{role}.slipstream") for role in ROLES}
    made["stranger"] = authority.issue(place / "stranger", "gateway.elsewhere", "slipstream", "x-gateway.slipstream")
    made["forged"] = Authority().issue(place / "forged", "gateway.slipstream")
    made["expired"] = authority.issue(place / "expired", "gateway.slipstream", lasts=-datetime.timedelta(hours=1))
    for name in ("forged", "expired"):
        (made[name] / "ca.crt").write_bytes(authority.pem)
    return made


def held(folder: Path) -> Certificates:
    return Certificates(str(folder), domain="slipstream")


@asynccontextmanager
async def serving(certificates: Certificates | None) -> AsyncIterator[str]:
    worker = WorkerService(
        WorkerIdentity(types_pb2.ModelInfo(name="toy"), worker_pb2.ROLE_VERIFIER), worker_pb2.WatchResponse
    )
    server = Server([Everything().register, worker.register], role_access(certificates))
    try:
        yield await server.start("127.0.0.1:0")
    finally:
        await server.stop(0)


async def call(line: grpc.aio.Channel, service: str) -> None:
    """One call of a service; raises what the caller is told."""
    try:
        if service == "slipstream.v1.VerifierService":
            assert await verifier_pb2_grpc.VerifierServiceStub(line).Decode(timeout=10).read() is not grpc.aio.EOF
        elif service == "slipstream.v1.DrafterService":
            assert await drafter_pb2_grpc.DrafterServiceStub(line).Draft(timeout=10).read() is not grpc.aio.EOF
        elif service == "slipstream.v1.WorkerService":
            await worker_pb2_grpc.WorkerServiceStub(line).GetModel(worker_pb2.GetModelRequest(), timeout=10)
            async for _ in worker_pb2_grpc.WorkerServiceStub(line).Watch(worker_pb2.WatchRequest(), timeout=10):
                break
        elif service == HEALTH:
            await health_pb2_grpc.HealthStub(line).Check(health_pb2.HealthCheckRequest(), timeout=10)
        else:
            await gateway_pb2_grpc.GatewayServiceStub(line).ListModels(gateway_pb2.ListModelsRequest(), timeout=10)
    except grpc.RpcError as error:
        raise error_of(error) from error


@pytest.mark.parametrize("role", [*ROLES, "stranger"])
async def test_a_role_may_call_only_the_services_that_the_table_allows(folders: dict[str, Path], role: str) -> None:
    services = {*ALLOWED_ROLES, "slipstream.v1.GatewayService"}
    dial = dialer(VERIFIER, held(folders[role]))
    async with serving(held(folders[VERIFIER])) as address, dial(address) as line:
        for service in services:
            if role in ALLOWED_ROLES.get(service, ()):
                await call(line, service)
                continue
            with pytest.raises(PermissionDenied, match="certificate names") as refusal:
                await call(line, service)
            assert refusal.value.reason == "ROLE"


async def refused(address: str, dial: Any) -> SlipstreamError:
    async with dial(address) as line:
        with pytest.raises(Unavailable) as refusal:
            await call(line, "slipstream.v1.WorkerService")
    assert refusal.value.reason == HANDSHAKE
    return refusal.value


@pytest.mark.parametrize("who", ["plaintext", "forged", "expired"])
async def test_without_a_certificate_of_the_authority_no_caller_is_admitted(folders: dict[str, Path], who: str) -> None:
    async with serving(held(folders[VERIFIER])) as address:
        dial = channel if who == "plaintext" else dialer(VERIFIER, held(folders[who]))
        assert "wants TLS" in (await refused(address, dial)).message


async def test_a_server_must_prove_the_role_that_was_dialled(folders: dict[str, Path]) -> None:
    """A drafter's own certificate is good, and lets it pose as nobody else."""
    async with serving(held(folders[DRAFTER])) as address:
        error = await refused(address, dialer(VERIFIER, held(folders[GATEWAY])))
        assert "does not name the host" in error.message


@pytest.mark.parametrize("kind", ["forged", "expired"])
async def test_a_server_with_an_untrusted_certificate_is_refused(folders: dict[str, Path], kind: str) -> None:
    async with serving(held(folders[kind])) as address:
        error = await refused(address, dialer(GATEWAY, held(folders[VERIFIER])))
        assert "not signed by the CA" in error.message


async def test_a_caller_configured_for_tls_never_falls_back_to_plaintext(folders: dict[str, Path]) -> None:
    async with serving(None) as address:
        assert "answers in plaintext" in (await refused(address, dialer(VERIFIER, held(folders[GATEWAY])))).message


async def test_both_sides_take_new_certificates_of_a_new_authority_without_a_restart(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    mine, theirs = (Path(shutil.copytree(folders[role], tmp_path / role)) for role in (VERIFIER, GATEWAY))
    async with serving(held(mine)) as address, dialer(VERIFIER, held(theirs))(address) as line:
        watch = worker_pb2_grpc.WorkerServiceStub(line).Watch(worker_pb2.WatchRequest())
        assert await watch.read() is not grpc.aio.EOF
        new = Authority("another CA")
        new.issue(mine, "verifier.slipstream")
        async with dialer(VERIFIER, held(folders[GATEWAY]))(address) as behind:
            assert (await _failure(behind)).reason == HANDSHAKE
        new.issue(theirs, "gateway.slipstream")
        await call(
            line, "slipstream.v1.VerifierService"
        )  # over a connection that the old authority vouches for nowhere
        assert not watch.done()  # what ran goes on
        watch.cancel()


async def _failure(line: grpc.aio.Channel) -> SlipstreamError:
    with pytest.raises(SlipstreamError) as refusal:
        await call(line, "slipstream.v1.WorkerService")
    return refusal.value


async def test_a_channel_ends_with_the_last_call_that_was_made_on_it(tmp_path: Path, folders: dict[str, Path]) -> None:
    theirs = Path(shutil.copytree(folders[GATEWAY], tmp_path / "gateway"))
    line: Any
    async with serving(held(folders[VERIFIER])) as address, dialer(VERIFIER, held(theirs))(address) as line:
        watch = worker_pb2_grpc.WorkerServiceStub(line).Watch(worker_pb2.WatchRequest())
        await watch.read()
        for _ in range(3):
            shutil.copytree(folders[GATEWAY], theirs, dirs_exist_ok=True, copy_function=shutil.copy)
            await call(line, "slipstream.v1.VerifierService")
        assert len(line._living) == 2  # the watch's and the present one
        watch.cancel()
        del watch
        await call(line, "slipstream.v1.VerifierService")
        assert len(line._living) == 1


@pytest.mark.parametrize("harm", ["no key", "key of another", "no certificate in it", "gone"])
async def test_files_that_do_not_fit_leave_the_former_certificates_in_use(
    tmp_path: Path, folders: dict[str, Path], harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Path(shutil.copytree(folders[VERIFIER], tmp_path / "verifier"))
    caplog.set_level("INFO", "slipstream.rpc.tls")
    certificates = held(mine)
    async with serving(certificates) as address:
        if harm == "no key":
            (mine / "tls.key").write_text("")
        elif harm == "key of another":
            shutil.copy(folders[GATEWAY] / "tls.key", mine / "tls.key")
        elif harm == "no certificate in it":
            (mine / "tls.crt").write_text("-----BEGIN CERTIFICATE-----\n")
        else:
            shutil.rmtree(mine)
        for _ in range(2):
            async with dialer(VERIFIER, held(folders[GATEWAY]))(address) as line:
                await call(line, "slipstream.v1.WorkerService")
        assert caplog.text.count("the former stay") == 1
        shutil.copytree(folders[VERIFIER], mine, dirs_exist_ok=True, copy_function=shutil.copy)
        assert certificates.current().key == certificates.current().key == (folders[VERIFIER] / "tls.key").read_bytes()
        assert caplog.text.count("can be read again") == 1


def test_a_folder_that_cannot_be_used_stops_a_role_at_its_start(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidArgument, match=r"must hold tls.crt, tls.key, ca.crt"):
        certificates_from_env({"SLIPSTREAM_TLS_FOLDER": str(tmp_path)})
    assert certificates_from_env({}) is None
    given = certificates_from_env({"SLIPSTREAM_TLS_FOLDER": str(folders[DRAFTER]), "SLIPSTREAM_TLS_DOMAIN": "here"})
    assert given is not None and given.domain == "here"


async def test_probes_need_no_certificate_and_reach_nothing_else(folders: dict[str, Path]) -> None:
    worker = WorkerService(WorkerIdentity(types_pb2.ModelInfo(), worker_pb2.ROLE_VERIFIER), worker_pb2.WatchResponse)
    server = Server([worker.register], role_access(held(folders[VERIFIER])))
    await server.start("127.0.0.1:0", "127.0.0.1:0")
    assert server.announcement == f"ready grpc={server.address} health={server.health_address}"
    async with channel(server.health_address) as line:
        health, request = health_pb2_grpc.HealthStub(line), health_pb2.HealthCheckRequest()
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await worker_pb2_grpc.WorkerServiceStub(line).GetModel(worker_pb2.GetModelRequest())
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await server.set_serving(False)  # as in a drain
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.stop(0)


async def test_the_log_reports_once_why_a_worker_cannot_be_reached(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    def tried() -> None:
        nonlocal tries
        tries += 1

    async with serving(held(folders[VERIFIER])) as address, channel(address) as line:
        watching = asyncio.create_task(WorkerWatch(address, line, tried).run())
        await until(lambda: tries >= 3)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    told = [record.message for record in caplog.records if "wants TLS" in record.message]
    assert len(told) == 1 and address in told[0]
