"""`slipstream doctor` and `key`: checks and keys for operators of gateways and workers."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import grpc
import typer

from slipstream.cli.options import AsJson, Connection, explained, need_installed
from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.client.gateway_endpoint import KEY_NAME, GatewayEndpoint, digest, new_key
from slipstream.errors import InvalidArgument, SlipstreamError, Unavailable
from slipstream.proposers.registry import find_method
from slipstream.rpc import DRAFTER, VERIFIER
from slipstream.rpc.channel import dialer, error_of, parsed
from slipstream.rpc.tls import Certificates, certificates_from_env
from slipstream.serving.default_drafters import shipped_draft_for
from slipstream.tokenizer.vocabulary import check_folder, share_vocabulary, template_warning
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, worker_pb2, worker_pb2_grpc

ANSWER_S = 5.0
"""Seconds within which a worker must answer."""
LIMITS, PAIR = "Limits", "A pair before it serves"
"""Groups of options in `--help`."""
PROBES = 9
"""Calls whose median is a worker's round trip."""
PROBE, TOKENS = "The quick brown fox", 48
NOT_WORTH_IT = 3
"""Exit status for a pair that fits and does not pay. Typer's own for bad usage is 2."""
TRIES = 4
"""Requests before the doctor reports that no drafter drafts: the first session of a pair waits for their connection."""


@dataclass(frozen=True)
class KeyLimits:
    """Options of `key`, with the names that they have in the file of keys."""

    sessions: Annotated[int | None, typer.Option(help="Most sessions at once.", min=1, rich_help_panel=LIMITS)] = None
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Most requests in a minute.", min=1, rich_help_panel=LIMITS)
    ] = None
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Most prompt and output tokens in a minute.", min=1, rich_help_panel=LIMITS)
    ] = None
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one prompt.", min=1, rich_help_panel=LIMITS)
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one output.", min=1, rich_help_panel=LIMITS)
    ] = None
    least_priority: Annotated[
        int | None, typer.Option(help="Lowest priority value that a request may have.", rich_help_panel=LIMITS)
    ] = None


def key(
    *,
    name: Annotated[str, typer.Argument(help="Name of the key and its tenant: letters, digits, _ and -.")],
    limits: KeyLimits,
    operator: Annotated[
        bool, typer.Option("--operator", help="The key may also call what concerns all tenants.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create an API key. Prints a line for the file of GATEWAY_API_KEYS, and the key itself on standard error.

    The key is stored nowhere; the line holds only its hash.
    """
    if not KEY_NAME.fullmatch(name):
        raise typer.BadParameter("a name has 1 to 64 letters, digits, _ and -.")
    created = new_key()
    fields = asdict(limits) | {"operator": "true" if operator else None}
    given = "".join(f", {field} = {value}" for field, value in fields.items() if value is not None)
    line = f'{name} = {{ sha256 = "{digest(created).hex()}"{given} }}'
    if as_json:
        typer.echo(json.dumps({"name": name, "key": created, "line": line}))
        return
    typer.echo(line)
    typer.echo(created, err=True)


@dataclass(frozen=True, slots=True)
class DiagnosedWorker:
    """What one worker reported."""

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


@dataclass(frozen=True)
class PairOptions:
    """Options of `doctor` for a pair that does not serve yet."""

    target: Annotated[str, typer.Option(help="A target model, to try a drafter with here.", rich_help_panel=PAIR)] = ""
    draft: Annotated[str, typer.Option(help="Its draft model, or the folder of heads.", rich_help_panel=PAIR)] = ""
    drafter: Annotated[str, typer.Option(help="The method that drafts with it.", rich_help_panel=PAIR)] = "model"
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts, as for `bench`; a few of four kinds.", rich_help_panel=PAIR)
    ] = None
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2, rich_help_panel=PAIR)] = 96
    translate: Annotated[
        bool,
        typer.Option(
            "--translate", help="The draft model has another tokenizer and translates its tokens.", rich_help_panel=PAIR
        ),
    ] = False
    dtype: Annotated[str, typer.Option(help="Type of weights and KV.", rich_help_panel=PAIR)] = "auto"


def doctor(
    *,
    worker: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a verifier or drafter; repeat it for more.")
    ] = None,
    connection: Connection,
    pair: PairOptions,
    as_json: AsJson = False,
) -> None:
    """Check each --worker's model and load, and request one text from each gateway with and without speculation.

    With --target a pair is tried before it serves: vocabulary, templates, acceptance on your prompts by depth, slice
    and context length, memory, and the speed-up to expect here. The last line is the verdict, `ship` or `do not ship`,
    by the rule of the reports of `slipstream train`. Certificates for workers come from SLIPSTREAM_TLS_FOLDER, as for
    the services. Exit status: 0 for all well and `ship`, 1 if anything is wrong or fails, 3 for a pair that would
    serve and is not worth it (`do not ship`).
    """
    if pair.target:
        _try_pair(pair, as_json=as_json)
        return
    gateways = connection.endpoints() if connection.server or not worker else []
    findings = asyncio.run(_diagnose(worker or [], gateways))
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    for finding in () if as_json else findings:
        typer.echo(f"{'ok   ' if finding.ok else 'WRONG'} {finding.text}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _try_pair(pair: PairOptions, *, as_json: bool) -> None:
    with explained("doctor"):
        need_installed("torch", "transformers")
        check_folder(pair.target)
        draft = _draft_of(pair)
        from slipstream.cli.pair_report import as_json as listed
        from slipstream.cli.pair_report import render
        from slipstream.client.load.workload import read_workload
        from slipstream.pairs.check import PROMPTS, check_pair
        from slipstream.pairs.figures import PairCheck

        asked = PROMPTS if pair.prompts is None else read_workload(pair.prompts)
        check = PairCheck(pair.target, draft, pair.drafter, translated=pair.translate)
        check_pair(check, asked, pair.max_tokens, pair.dtype, lambda stage: typer.echo(f"doctor: {stage}", err=True))
    typer.echo(listed(check) if as_json else render(check))
    if not check.ships:
        raise typer.Exit(1 if check.wrong else NOT_WORTH_IT)


def _draft_of(pair: PairOptions) -> str:
    """The model or heads that the method drafts with; of a draft model that is not named the shipped one, as `serve`
    takes it. Raises InvalidArgument where there is none for the target, NotFound for one that is missing."""
    method = find_method(pair.drafter)
    if not method.needs_model:
        return ""
    draft = pair.draft or ("" if method.needs_hidden_states else shipped_draft_for(pair.target))
    if not draft:
        raise InvalidArgument(
            f"the drafter {pair.drafter} needs a model: name one for {pair.target} with --draft, or try "
            "`--drafter suffix`, which needs none."
        )
    if not method.needs_hidden_states:  # the folder of heads may have no config.json
        check_folder(draft)
    return draft


async def _diagnose(addresses: Sequence[str], gateways: Sequence[GatewayEndpoint]) -> list[Finding]:
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
