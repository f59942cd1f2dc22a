"""Checks of workers and gateways that serve: their models, their load, and one text with and without speculation."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.client.gateway_endpoint import GatewayEndpoint
from slipstream.errors import SlipstreamError, Unavailable
from slipstream.rpc import DRAFTER, VERIFIER
from slipstream.rpc.channel import dialer, error_of, parsed
from slipstream.rpc.tls import Certificates, certificates_from_env
from slipstream.tokenizer.vocabulary import share_vocabulary, template_warning
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, worker_pb2, worker_pb2_grpc

ANSWER_S = 5.0
"""Seconds within which a worker must answer."""
PROBES = 9
"""Calls whose median is a worker's round trip."""
PROBE, TOKENS = "The quick brown fox", 48
TRIES = 4
"""Requests before the doctor reports that no drafter drafts: the first session of a pair waits for their connection."""


@dataclass(frozen=True, slots=True)
class DiagnosedWorker:
    """Answers of one worker to a diagnosis."""

    address: str
    identity: worker_pb2.GetModelResponse
    load: worker_pb2.WatchResponse
    round_trip_s: float

    @property
    def verifies(self) -> bool:
        return self.identity.role == worker_pb2.ROLE_VERIFIER


@dataclass(frozen=True, slots=True)
class Finding:
    ok: bool
    text: str


async def diagnose(addresses: Sequence[str], gateways: Sequence[GatewayEndpoint]) -> list[Finding]:
    findings: list[Finding] = []
    workers: list[DiagnosedWorker] = []
    for address in addresses:
        try:
            workers.append(await _query_worker(address, certificates_from_env()))
        except SlipstreamError as error:
            findings.append(Finding(False, f"worker {address}: {error.message}"))
    for worker in workers:
        findings += _check_worker(worker)
    findings += _check_pairs(workers)
    for gateway in gateways:
        findings += await _check_gateway(gateway)
    return findings


async def _query_worker(address: str, certificates: Certificates | None) -> DiagnosedWorker:
    """Raises the SlipstreamError with which the worker cannot be reached."""
    failure = SlipstreamError("the worker was not called.")
    # With TLS only the certificate shows the role; in plaintext the first try succeeds for both roles.
    for role in (VERIFIER, DRAFTER)[: 1 if certificates is None else 2]:
        async with dialer(role, certificates)(address) as channel:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await _probe(address, worker_pb2_grpc.WorkerServiceStub(channel))
            except grpc.aio.AioRpcError as error:
                failure = error_of(error)
            except SlipstreamError as error:
                failure = error
            except TimeoutError:
                failure = Unavailable(f"no answer within {ANSWER_S:g} s.")
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
        raise Unavailable("it reports no load.")
    return DiagnosedWorker(address, identity, load, statistics.median(times))


def _check_worker(worker: DiagnosedWorker) -> Iterator[Finding]:
    identity, load = worker.identity, worker.load
    role = "verifier" if worker.verifies else f"drafter ({identity.method})"
    share = load.kv_blocks_free / load.kv_blocks_total if load.kv_blocks_total else 1.0
    yield Finding(
        True,
        f"{role} {worker.address}: {identity.model.name or 'no model'}, {load.sessions} sessions, {share:.0%} of KV "
        f"free, round trip {1e3 * worker.round_trip_s:.1f} ms",
    )
    if worker.verifies and identity.model.arithmetic:
        promise = "the same tokens" if identity.model.batch_invariant else "the same distribution"
        yield Finding(True, f"{role} {worker.address}: arithmetic {identity.model.arithmetic}, {promise} promised")
    if load.draining:
        yield Finding(False, f"{role} {worker.address} is draining: it receives no new sessions.")
    if load.waiting:
        yield Finding(False, f"{role} {worker.address}: {load.waiting} sessions wait for KV; add memory or verifiers.")


def _check_pairs(workers: Sequence[DiagnosedWorker]) -> Iterator[Finding]:
    """Checks that drafters have the verifiers' vocabularies, and whether they have their chat templates."""
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
            elif warning := template_warning(model, target):
                yield Finding(True, f"drafter {drafter.address}: {warning}")


async def _check_gateway(gateway: GatewayEndpoint) -> list[Finding]:
    """Generates one short text with and without speculation."""
    try:
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(gateway.channel())
            plain = await complete(channel, _request(speculate=False))
            for _ in range(TRIES):
                speculative = await complete(channel, _request(speculate=True))
                if speculative.finished.statistics.drafted:
                    break
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            served = await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=ANSWER_S)
    except SlipstreamError as error:
        return [Finding(False, f"gateway {gateway.address}: {error.message} [{error.reason}]")]
    paused = any(each.paused_verifiers for each in served.models if each.model.name == plain.started.model)
    return list(_compare_texts(gateway.address, plain, speculative, paused))


def _compare_texts(address: str, plain: Completion, speculative: Completion, paused: bool) -> Iterator[Finding]:
    """`paused`: verifiers of this model report that drafting does not pay there now, which is no fault."""
    seen, tokens = speculative.finished.statistics, len(speculative.token_ids)
    model = plain.started.model
    yield Finding(
        True,
        f"gateway {address}: {model}, {tokens} tokens in {seen.rounds} rounds, {seen.accepted} of {seen.drafted} "
        f"candidates accepted; {_speed(plain)} without speculation, {_speed(speculative)} with it",
    )
    if not seen.drafted and paused:
        yield Finding(True, f"gateway {address}: drafting pauses, since it does not pay there now.")
    elif not seen.drafted:
        yield Finding(False, f"gateway {address}: no candidate was verified; check `slipstream status` and the rules.")
    if plain.token_ids != speculative.token_ids:
        yield Finding(
            True, f"gateway {address}: the two texts differ; in fp32 they must not (elsewhere near-ties may)."
        )


def _speed(completion: Completion) -> str:
    return f"{1e3 * (completion.tpot_s or 0.0):.1f} ms a token"


def _request(speculate: bool) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt=PROBE,
        max_tokens=TOKENS,
        ignore_eos=True,
        sampling=gateway_pb2.SamplingOptions(temperature=0.0),
        speculation=gateway_pb2.SpeculationOptions(disabled=not speculate),
    )
