"""`slipstream doctor`: asks workers and a gateway what a person would, and says what is wrong."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated

import grpc
import typer

from slipstream.cli.options import ApiKey, Ca, Servers, Tls
from slipstream.cli.session import doors_of
from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.client.gateway_endpoint import GatewayEndpoint
from slipstream.errors import SlipstreamError, Unavailable
from slipstream.rpc.channel import dialling, error_of, parsed
from slipstream.rpc.role_authorization import DRAFTER, VERIFIER
from slipstream.rpc.tls import Certificates, certificates_from_env
from slipstream.tokenizer.pairing import share_vocabulary
from slipstream.v1 import gateway_pb2, worker_pb2, worker_pb2_grpc

PATIENCE_S = 5.0
"""For a worker's answer."""
PROBES = 9
PROMPT, TOKENS = "The quick brown fox", 48
TRIES = 4
"""Before nobody drafts: the first session of a pair waits for their connection."""


@dataclass(frozen=True, slots=True)
class DiagnosedWorker:
    """What one said of itself."""

    address: str
    identity: worker_pb2.GetModelResponse
    load: worker_pb2.WatchResponse
    round_trip_s: float

    @property
    def verifies(self) -> bool:
        return self.identity.role == worker_pb2.ROLE_VERIFIER


@dataclass(frozen=True, slots=True)
class Finding:
    well: bool
    text: str


def doctor(
    worker: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a verifier or drafter; may be given again.")
    ] = None,
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca: Ca = "",
) -> None:
    """Ask each --worker what it runs and how it does, and each gateway for one text with and without speculation.

    Certificates for workers come from SLIPSTREAM_TLS_FOLDER, as for the services. Ends with status 1 if anything is
    wrong.
    """
    findings = asyncio.run(_examine(worker or [], doors_of(server, api_key, tls, ca) if server or not worker else []))
    for finding in findings:
        typer.echo(f"{'ok   ' if finding.well else 'WRONG'} {finding.text}")
    if not all(finding.well for finding in findings):
        raise typer.Exit(1)


async def _examine(addresses: Sequence[str], doors: Sequence[GatewayEndpoint]) -> list[Finding]:
    findings: list[Finding] = []
    workers: list[DiagnosedWorker] = []
    for address in addresses:
        try:
            workers.append(await _ask(address, certificates_from_env()))
        except SlipstreamError as error:
            findings.append(Finding(False, f"worker {address}: {error.message}"))
    for worker in workers:
        findings += _of_worker(worker)
    findings += _of_pairs(workers)
    for door in doors:
        findings += await _of_gateway(door)
    return findings


async def _ask(address: str, certificates: Certificates | None) -> DiagnosedWorker:
    """Raises the SlipstreamError for which it does not answer."""
    failure = SlipstreamError("nobody was asked.")
    # Which role it has is seen from its certificate alone; in plaintext the first try does.
    for role in (VERIFIER, DRAFTER)[: 1 if certificates is None else 2]:
        async with dialling(role, certificates)(address) as line:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await _probe(address, worker_pb2_grpc.WorkerServiceStub(line))
            except grpc.aio.AioRpcError as error:
                failure = error_of(error)
            except SlipstreamError as error:
                failure = error
            except TimeoutError:
                failure = Unavailable(f"no answer within {PATIENCE_S:g} s.")
    raise failure


async def _probe(address: str, stub: worker_pb2_grpc.WorkerServiceStub) -> DiagnosedWorker:
    identity = parsed(await stub.GetModel(worker_pb2.GetModelRequest()))
    times = []
    for _ in range(PROBES):
        began = time.perf_counter()
        await stub.GetModel(worker_pb2.GetModelRequest())
        times.append(time.perf_counter() - began)
    watching = stub.Watch(worker_pb2.WatchRequest())
    load = parsed(await watching.read())
    watching.cancel()
    if load is grpc.aio.EOF:
        raise Unavailable("it does not say how busy it is.")
    return DiagnosedWorker(address, identity, load, statistics.median(times))


def _of_worker(worker: DiagnosedWorker) -> Iterator[Finding]:
    identity, load = worker.identity, worker.load
    role = "verifier" if worker.verifies else f"drafter ({identity.method})"
    share = load.kv_blocks_free / load.kv_blocks_total if load.kv_blocks_total else 1.0
    yield Finding(
        True,
        f"{role} {worker.address}: {identity.model.name or 'no model'}, {load.sessions} sessions, {share:.0%} of KV "
        f"free, round trip {1e3 * worker.round_trip_s:.1f} ms",
    )
    if load.draining:
        yield Finding(False, f"{role} {worker.address} is draining: it gets no new sessions.")
    if load.waiting:
        yield Finding(False, f"{role} {worker.address}: {load.waiting} sessions wait for KV; add memory or verifiers.")


def _of_pairs(workers: Sequence[DiagnosedWorker]) -> Iterator[Finding]:
    """Whether drafters speak the verifiers' vocabulary."""
    for verifier in (worker for worker in workers if worker.verifies):
        target = verifier.identity.model
        for drafter in (worker for worker in workers if not worker.verifies):
            model = drafter.identity.model
            if not share_vocabulary(model, target):
                yield Finding(
                    False,
                    f"drafter {drafter.address} ({model.name}) has another vocabulary than verifier {verifier.address} "
                    f"({target.name}): choose a pair with one tokenizer, or DRAFTER_TRANSLATE_FOR.",
                )


async def _of_gateway(door: GatewayEndpoint) -> list[Finding]:
    """One short text, both ways."""
    try:
        async with AsyncExitStack() as stack:
            line = await stack.enter_async_context(door.channel())
            plain = await complete(line, _request(speculate=False))
            for _ in range(TRIES):
                guessed = await complete(line, _request(speculate=True))
                if guessed.finished.statistics.drafted:
                    break
    except SlipstreamError as error:
        return [Finding(False, f"gateway {door.address}: {error.message} [{error.reason}]")]
    return list(_of_texts(door.address, plain, guessed))


def _of_texts(address: str, plain: Completion, guessed: Completion) -> Iterator[Finding]:
    told, tokens = guessed.finished.statistics, len(guessed.token_ids)
    model = plain.started.model
    yield Finding(
        True,
        f"gateway {address}: {model}, {tokens} tokens in {told.rounds} rounds, {told.accepted} of {told.drafted} "
        f"candidates accepted; {_pace(plain)} without speculation, {_pace(guessed)} with it",
    )
    if not told.drafted:
        yield Finding(
            False, f"gateway {address}: no candidate was verified; see `slipstream status` for drafters, and the rules."
        )
    if plain.token_ids != guessed.token_ids:
        yield Finding(True, f"gateway {address}: the two texts part; in fp32 they must not (elsewhere, near-ties may).")


def _pace(completion: Completion) -> str:
    return f"{1e3 * (completion.tpot_s or 0.0):.1f} ms a token"


def _request(speculate: bool) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt=PROMPT,
        max_tokens=TOKENS,
        ignore_eos=True,
        sampling=gateway_pb2.SamplingOptions(temperature=0.0),
        speculation=gateway_pb2.SpeculationOptions(disabled=not speculate),
    )
