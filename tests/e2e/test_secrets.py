"""The whole system behind certificates and keys, as real processes that log all they can: texts go through it, and
neither they nor the keys are in any log or span, nor in responses to other clients."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.client.client import RetrySettings, complete
from slipstream.client.completion import Completion
from slipstream.client.gateway_endpoint import GatewayEndpoint, digest, new_key
from slipstream.errors import NotFound, PermissionDenied, SlipstreamError, Unauthenticated
from slipstream.rpc import DRAFTER, GATEWAY, VERIFIER
from slipstream.rpc.channel import channel, dialer, error_of
from slipstream.rpc.tls import Certificates
from slipstream.telemetry.spans import REQUEST_MODEL
from slipstream.tokenizer.vocabulary import load_tokenizer
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.e2e.conftest import ROOT
from tests.support.certificates import Authority
from tests.support.http_client import CHAT_TEMPLATE
from tests.support.scraping import scrape

ALICE, BOB, STRANGER = new_key(), new_key(), new_key()
PROMPT = "xyzzyplugh the secret of alice is 48151623"
PREDICTION, STOP, SALT = "frobnicated prediction", "quuxstopword", "saltandpepper"
ROLES = (VERIFIER, DRAFTER, GATEWAY)
MODELS = str(ROOT / "models" / "target")


@dataclass
class Process:
    """A running role, and the file of its log."""

    output: Path
    process: subprocess.Popen[bytes]
    address: str = ""
    health: str = ""
    metrics: str = ""
    http: str = ""

    def wait_ready(self) -> None:
        for line in iter(lambda: self.process.stdout.readline() if self.process.stdout else b"", b""):
            if line.startswith(b"ready"):
                words = dict(word.split("=") for word in line.decode().split()[1:])
                self.address, self.health, self.metrics = words["grpc"], words["health"], words["metrics"]
                self.http = words.get("http", "")
                return
        raise AssertionError(self.output.read_text())


class System:
    """Verifier, drafter and gateway, each with a certificate of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.traces = folder / "traces"
        authority = Authority()
        for role in ROLES:
            authority.issue(folder / role, f"{role}.slipstream")
        authority.issue(folder / "public", "localhost")
        self.ca = str(folder / "public" / "ca.crt")
        keys = {"alice": ALICE, "bob": BOB}
        lines = (f'{name} = {{ sha256 = "{digest(key).hex()}" }}\n' for name, key in keys.items())
        (folder / "keys.toml").write_text("".join(lines))
        (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
        size = load_tokenizer(MODELS).get_vocab_size()
        model = f"emulated:vocabulary={size}"  # a drafter as slow as the target would never send in time
        drafter = {"DRAFTER_MODEL": model + "&acceptance=0.7", "DRAFTER_HEALTH_LISTEN": "127.0.0.1:0"}
        verifier = {"VERIFIER_MODEL": model + "&base_ms=20", "VERIFIER_MEASURE_S": "0.2"}
        self.processes: list[Process] = []
        self.drafter = self.start("drafter_svc", DRAFTER, drafter)
        self.verifier = self.start("verifier_svc", VERIFIER, verifier)
        self.gateway = self.start(
            "gateway",
            GATEWAY,
            {
                "GATEWAY_TOKENIZER": MODELS,
                "GATEWAY_VERIFIERS": self.verifier.address,
                "GATEWAY_DRAFTERS": f"model={self.drafter.address}",
                "GATEWAY_API_KEYS": str(folder / "keys.toml"),
                "GATEWAY_TLS_FOLDER": str(folder / "public"),
                "GATEWAY_REHOMING_WAIT_S": "1",
                "GATEWAY_HTTP": "127.0.0.1:0",
                "GATEWAY_CHAT_TEMPLATE": str(folder / "chat.jinja"),
            },
        )
        self.front = self.gateway.address.replace("127.0.0.1", "localhost")

    def start(self, module: str, role: str, settings: dict[str, str]) -> Process:
        prefix = f"{role.upper()}_"
        places = {f"{prefix}{name}": "127.0.0.1:0" for name in ("LISTEN", "HEALTH_LISTEN", "METRICS_LISTEN")}
        places |= {f"{prefix}LOG_LEVEL": "debug"}
        environment = os.environ | places | settings | {"SLIPSTREAM_TLS_FOLDER": str(self.folder / role)}
        environment |= {"SLIPSTREAM_TRACE_FOLDER": str(self.traces), "OTEL_TRACES_SAMPLER": "always_on"}
        environment |= {"GRPC_VERBOSITY": "DEBUG", "OMP_NUM_THREADS": "1"}
        output = self.folder / f"{role}.log"
        with output.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.verbose_role", module],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        started = Process(output, process)
        self.processes.append(started)
        started.wait_ready()
        return started

    def door(self, key: str) -> GatewayEndpoint:
        return GatewayEndpoint(self.front, key, ca=self.ca)

    def web(self, key: str) -> httpx.AsyncClient:
        context, url = ssl.create_default_context(cafile=self.ca), self.gateway.http.replace("127.0.0.1", "localhost")
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(
            base_url=f"https://{url}", verify=context, headers=headers, timeout=60, trust_env=False
        )

    def spans(self) -> dict[str, str]:
        """The exported spans of each role, by its file, as JSON, but for the models that clients named."""
        named = re.compile(rf'"{re.escape(REQUEST_MODEL)}","value":{{"stringValue":"[^"]*"')
        return {file.name: named.sub("", file.read_text()) for file in self.traces.iterdir()}

    def stop(self) -> None:
        for each in reversed(self.processes):
            each.process.terminate()
        for each in self.processes:
            rest, _ = each.process.communicate(timeout=30)
            with each.output.open("ab") as output:
                output.write(rest)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    made = System(tmp_path_factory.mktemp("system"))
    try:
        yield made
    finally:
        for each in made.processes:
            each.process.kill()
            each.process.communicate()


def request(**changes: Any) -> gateway_pb2.GenerateRequest:
    fields: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": 60,
        "ignore_eos": True,
        "stop": [STOP],
        "cache_salt": SALT,
        "sampling": gateway_pb2.SamplingOptions(temperature=0.0, seed=1),
    }
    return gateway_pb2.GenerateRequest(**(fields | changes))


async def generate(door: GatewayEndpoint, **changes: Any) -> Completion:
    async with door.channel() as line:
        return await complete(line, request(**changes), retry=RetrySettings(resume_s=1.0))


async def test_texts_go_through_certificates_and_keys_and_probes_without(system: System) -> None:
    first, second = await generate(system.door(ALICE)), await generate(system.door(BOB))
    assert first.token_ids == second.token_ids and len(first.token_ids) == 60
    async with asyncio.timeout(120):
        while not (await generate(system.door(ALICE))).finished.statistics.accepted:  # the drafter's link may be young
            await asyncio.sleep(0.1)
    for each in system.processes:
        async with channel(each.health) as line:
            health = health_pb2_grpc.HealthStub(line)
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_command_line_comes_in_by_the_environment(system: System) -> None:
    command = [sys.executable, "-m", "slipstream", "generate", "x", "--server", system.front, "--max-tokens", "5"]
    environment = os.environ | {"SLIPSTREAM_CA": system.ca}
    good = subprocess.run(command, cwd=ROOT, env=environment | {"SLIPSTREAM_API_KEY": ALICE}, capture_output=True)
    bad = subprocess.run(command, cwd=ROOT, env=environment | {"SLIPSTREAM_API_KEY": STRANGER}, capture_output=True)
    assert good.returncode == 0
    assert bad.returncode == 1 and b"UNAUTHENTICATED" in bad.stderr
    assert STRANGER.encode() not in bad.stdout + bad.stderr and b"Traceback" not in bad.stderr


async def test_a_drafters_certificate_opens_no_verifier(system: System) -> None:
    stolen = Certificates(str(system.folder / DRAFTER), domain="slipstream")
    async with dialer(VERIFIER, stolen)(system.verifier.address) as line:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await worker_pb2_grpc.WorkerServiceStub(line).GetModel(worker_pb2.GetModelRequest())
    assert isinstance(error_of(refusal.value), PermissionDenied)


TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/completions", {"prompt": [PROMPT, PROMPT], "stream": True}),
    ("/v1/completions", {"prompt": PROMPT, "prediction": {"type": "content", "content": PREDICTION}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ("/v1/responses", {"input": PROMPT, "instructions": PREDICTION, "metadata": {"a": PROMPT}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "stop_sequences": [STOP]}),
    ("/tokenize", {"prompt": PROMPT}),
]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": PROMPT}),
    ("/v1/completions", {"stop": {PROMPT: STOP}}),
    ("/v1/completions", {"stop": [STOP * 100]}),
    ("/v1/completions", {"cache_salt": SALT * 20}),
    ("/v1/completions", {"prompt": PROMPT * 60_000}),
    ("/v1/completions", {"prediction": {"type": "content", "content": PREDICTION * 60_000}}),
    ("/v1/completions", {"structured_outputs": {"regex": f"({PROMPT}"}}),
    ("/v1/chat/completions", {"messages": [{"role": PROMPT, "content": [{"type": "image", "text": PROMPT}]}]}),
    ("/v1/responses", {"input": PROMPT, "previous_response_id": PROMPT}),
    ("/v1/messages", {"messages": [{"role": "user", "content": {PROMPT: PROMPT}}]}),
    ("/v1/" + PROMPT, {}),
]


async def through_http(system: System) -> list[str]:
    """Texts and mistakes over HTTP; returns what the mistakes were answered, and what Bob and strangers got."""
    reported: list[str] = []
    async with system.web(ALICE) as alice, system.web(BOB) as bob, system.web(STRANGER) as stranger:
        for path, more in TEXTS:
            asked = {"max_tokens": 60, "temperature": 0, "seed": 1, "ignore_eos": True, "cache_salt": SALT}
            made = await alice.post(path, json=asked | {"stop": [STOP]} | more)
            assert made.status_code == 200, made.text
            if path == "/v1/responses":
                answers = [await bob.get(f"/v1/responses/{name}") for name in (made.json()["id"], "resp_never")]
                assert [each.status_code for each in answers] == [404, 404]
                reported += [each.text for each in answers]
        for path, more in WRONG:
            refused = await alice.post(path, json={"prompt": "x", "max_tokens": 5} | more)
            assert 400 <= refused.status_code < 500, (path, more, refused.text)
            named = "model" in more or PROMPT in path  # the name of what is not there is her own word
            reported.append(refused.text.replace(PROMPT, "", 1) if named else refused.text)
        reported.append((await alice.post("/v1/completions", content=b'{"prompt": "' + PROMPT.encode())).text)
        reported.append((await alice.post("/v1/completions", json={}, headers={"last-event-id": PROMPT})).text)
        for headers in ({}, {"x-api-key": STRANGER}, {"authorization": STRANGER}):
            refused = await stranger.post("/v1/messages", params={"key": ALICE}, json=TEXTS[5][1], headers=headers)
            assert refused.status_code == 401
            reported.append(refused.text)
        reported.append((await bob.get("/v1/models")).text)
    return reported


async def trouble(system: System) -> list[str]:
    """Everything that goes wrong in ways that are likely to be logged or told; returns what Bob was told."""
    reported: list[str] = []
    for key, changes in [
        (STRANGER, {}),
        (ALICE, {"prompt": PROMPT * 60_000}),
        (ALICE, {"model": PROMPT}),
        (ALICE, {"stop": [STOP * 100]}),
        (ALICE, {"cache_salt": SALT * 20}),
        (ALICE, {"max_tokens": 0}),
        (ALICE, {"speculation": gateway_pb2.SpeculationOptions(drafters=[PREDICTION])}),
        (ALICE, {"prediction": gateway_pb2.Prediction(text=PREDICTION * 60_000)}),
    ]:
        with pytest.raises(SlipstreamError):
            await generate(system.door(key), **changes)
    async with system.door(ALICE).channel() as line, system.door(BOB).channel() as others:
        raw = line.unary_unary("/slipstream.v1.GatewayService/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError):
            await raw(b"\xff" + PROMPT.encode())
        stub, bob = gateway_pb2_grpc.GatewayServiceStub(line), gateway_pb2_grpc.GatewayServiceStub(others)
        stream = stub.Generate(request(max_tokens=2000))
        session = (await stream.read()).started.session_id
        system.drafter.process.kill()  # in mid-text
        for name in (session, PROMPT):
            for call in (
                bob.GetSession(gateway_pb2.GetSessionRequest(session_id=name)),
                bob.Cancel(gateway_pb2.CancelRequest(session_id=name)),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call
                error = error_of(refusal.value)
                assert isinstance(error, NotFound)
                reported.append(error.message.replace(PROMPT, "", 1))  # his own word
        for _ in range(5):
            await stream.read()
        await stub.Cancel(gateway_pb2.CancelRequest(session_id=session))
        while await stream.read() is not grpc.aio.EOF:
            pass
        reported.append(str(await bob.ListModels(gateway_pb2.ListModelsRequest())))
        gone = asyncio.create_task(generate(system.door(ALICE), max_tokens=2000))
        await asyncio.sleep(0.2)
        system.verifier.process.kill()
        with pytest.raises(SlipstreamError):
            await gone
    with pytest.raises(SlipstreamError) as refused:
        await generate(system.door(BOB))
    reported.append(refused.value.message)
    with pytest.raises(Unauthenticated):
        await generate(system.door(STRANGER))
    return reported


async def test_no_key_and_no_text_is_in_any_log_or_in_any_response_to_another_client(system: System) -> None:
    output = await generate(system.door(ALICE), prediction=gateway_pb2.Prediction(text=PREDICTION))
    reported = await through_http(system)
    scraped = {f"metrics of {each.output.name}": (await scrape(each.metrics)).text for each in system.processes}
    async with asyncio.timeout(60):  # those that are killed below send no more
        while not all(system.spans().values()):
            await asyncio.sleep(0.1)
    reported += await trouble(system)
    scraped["metrics after trouble"] = (await scrape(system.gateway.metrics)).text
    assert 'reason="NO_SESSION"' in scraped["metrics after trouble"] and "emulated" in scraped["metrics of gateway.log"]
    await asyncio.to_thread(system.stop)
    tokenizer = load_tokenizer(MODELS)
    ids = list(output.started.prompt_token_ids)
    secrets = [ALICE, BOB, STRANGER, digest(ALICE).hex(), PROMPT, PREDICTION, STOP, SALT, output.text[:20]]
    secrets += [PROMPT[:12], PROMPT[-12:], ", ".join(map(str, ids[:4])), ", ".join(map(str, output.token_ids[:4]))]
    assert tokenizer.decode(ids).endswith(PROMPT[-12:])
    logs = {each.output.name: each.output.read_text(errors="replace") for each in system.processes}
    assert all(len(log) > 100 for log in logs.values()), "the roles were to be loud"
    assert "lost the stream to" in logs["gateway.log"]
    for log in logs.values():  # by loggers that are written at the level of the settings, too
        ready = [json.loads(line) for line in log.splitlines() if line.startswith('{"event": "ready grpc=')]
        assert ready and ready[0]["logger"] in ("slipstream.process", "gateway.gateway")
    spans = system.spans()
    assert sorted(name.rpartition("-")[0] for name in spans) == [f"slipstream-{role}" for role in sorted(ROLES)]
    for name, log in (logs | scraped | spans).items():
        for secret in secrets:
            assert secret not in log, f"{name} holds {secret!r}"
    for sentence in reported:
        for secret in secrets:
            assert secret not in sentence
