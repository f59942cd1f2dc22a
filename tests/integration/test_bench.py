"""`slipstream bench` against a real gateway over gRPC and HTTP: what it sends, counts, prints and writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from measurement.load.runner import constant, open_loop
from measurement.load.senders import sending_http
from slipstream.cli.commands import app
from slipstream.errors import FailedPrecondition, Unavailable
from tests.support.http_client import Web, web
from tests.support.scripted_gateway import Setting


@pytest.fixture
async def served(setting: Setting) -> AsyncIterator[Web]:
    async with AsyncExitStack() as stack:
        yield await web(setting, stack, setting.verifier())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"prompt": "Tell me.", "workload": "chat"}, {"prompt": "def f(", "workload": "code", "max_tokens": 5}] * 2
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


async def run(served: Web, prompts: Path, *words: str, http: bool = False, code: int = 0) -> str:
    where = ["--http", served.url] if http else ["--server", served.front.gateway.address]
    command = ["bench", str(prompts), *where, "--max-tokens", "12", "--repeats", "2", *words]
    result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == code, result.output
    return result.stdout if not code else result.output


@pytest.mark.parametrize("http", [False, True])
async def test_runs_in_pairs_count_every_request_and_token(served: Web, prompts: Path, http: bool) -> None:
    found = json.loads(await run(served, prompts, "--json", "--ttft-ms", "60000", "--e2e-ms", "0.001", http=http))
    assert len(found["pairs"]) == 2
    for arm in ("off", "on"):
        assert all(pair[arm]["requests"] == 4 and pair[arm]["tokens"] == 2 * 12 + 2 * 5 for pair in found["pairs"])
        assert found["arms"][arm]["requests"] == 8
        assert (found["slices"]["chat"][arm]["tokens"], found["slices"]["code"][arm]["tokens"]) == (4 * 12, 4 * 5)
        whole = found["arms"][arm]
        assert 0 < whole["ttft_p50_ms"] <= whole["ttft_p99_ms"] <= whole["e2e_p99_ms"] < 60_000
        assert whole["good_share"] == 0.0  # nobody answers within 1 µs
    assert found["on_off"]["tokens_per_s"]["pairs"] == 2
    assert not found["errors"]
    machine = found["pairs"][0]["machine"]
    assert 0.0 <= machine["steal_percent"] <= 100.0 and machine["load"] >= 0.0


@pytest.mark.parametrize("http", [False, True])
async def test_only_speculation_differs_between_the_runs_of_a_pair(served: Web, prompts: Path, http: bool) -> None:
    await run(served, prompts, "--json", "--warmup", "0", "--concurrency", "1", "--max-draft-tokens", "3", http=http)
    opens = served.front.verifiers[0].opens()
    assert len(opens) == 16
    off, on, on_again, off_again = (opens[start : start + 4] for start in range(0, 16, 4))  # the pairs' order turns
    assert [each.policy.max_draft_tokens for each in [*off, *off_again]] == [0] * 8
    assert [each.policy.max_draft_tokens for each in [*on, *on_again]] == [3] * 8
    for plain, speculative in zip(off, on, strict=True):
        assert list(plain.prefix.token_ids) == list(speculative.prefix.token_ids)
        assert plain.sampling == speculative.sampling


async def test_an_open_loop_by_the_command(served: Web, prompts: Path) -> None:
    words = ("--json", "--rate", "50", "--arrivals", "constant", "--compare", "on")
    found = json.loads(await run(served, prompts, *words, http=True))
    assert list(found["arms"]) == ["on"] and not found["on_off"]
    assert found["arms"]["on"]["requests"] == 8


class Loads(HTMLParser):
    """Everything that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "data", "action")]


async def test_the_report_is_one_small_file_that_loads_nothing(served: Web, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    printed = await run(served, prompts, "--html", str(file))
    assert "on / off" in printed and "steal" in printed
    page = file.read_text()
    seen = Loads()
    seen.feed(page)
    assert not seen.fetched and "http" not in page.replace(served.url, "") and "@import" not in page
    assert "script" not in seen.tags and "link" not in seen.tags
    assert seen.tags.count("svg") == 4 and seen.tags.count("table") >= 4
    assert len(page) < 60_000


async def test_a_key_is_not_in_the_report(served: Web, prompts: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    found = await run(served, prompts, "--json", "--api-key", "slipstream-secret", "--html", str(page))
    assert "slipstream-secret" not in found + page.read_text()


async def test_a_benchmark_that_cannot_run_ends_with_one_sentence_and_a_reason(
    served: Web, prompts: Path, tmp_path: Path
) -> None:
    assert "BAD_RATE" in await run(served, prompts, "--rate", "0", code=1)
    assert "BAD_FILE" in await run(served, prompts, "--html", str(tmp_path / "no" / "page"), code=1)
    for content in ("", "no json", '{"prompt": 3}', '{"prompt": "a", "tokens": 1}', '{"prompt": "a", "max_tokens": 0}'):
        prompts.write_text(content)
        assert "BAD_WORKLOAD" in await run(served, prompts, code=1)
    prompts.write_text('{"prompt": "a"}')
    nobody = ("--server", "127.0.0.1:9", "--http", "http://127.0.0.1:9")  # the discard service's port, which none has
    assert "HTTP_FAILED" in await run(served, prompts, *nobody, code=1)
    assert "NO_GATEWAY" in await run(served, prompts, *nobody[:2], code=1)


class Held:
    """An HTTP server that answers nobody before it has heard `count` requests."""

    def __init__(self, count: int) -> None:
        self._heard, self._count, self._all = 0, count, asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self._heard += 1
        if self._heard == self._count:
            self._all.set()
        await self._all.wait()
        usage = {"choices": [], "usage": {"completion_tokens": 1}}
        events = [{"choices": [{"text": "a"}]}, usage]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        writer.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()


async def test_no_pool_of_connections_holds_an_open_loop_back() -> None:
    """More requests than a client library's pool has connections are under way at once."""
    server = await asyncio.start_server(Held(150), "127.0.0.1", 0)
    async with server, asyncio.timeout(30):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        bodies: list[dict[str, Any]] = [{"prompt": "a"}] * 150
        async with sending_http(url, bodies) as send:
            done = await open_loop(send, 150, constant(1000.0))
    assert len(done.served) == 150


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nbusy", "HTTP_STATUS"),
        ('HTTP/1.1 200 OK\r\ncontent-length: 22\r\n\r\ndata: {"choices": []}\n\n', "STREAM_LOST"),
        ('HTTP/1.1 200 OK\r\ncontent-length: 25\r\n\r\ndata: {"error": "gone"}\n\n\n', "STREAM_LOST"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ndata: ", "HTTP_FAILED"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata: {]\n", "GARBLED"),
    ],
)
async def test_a_stream_that_is_no_whole_answer_fails(answer: str, reason: str) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer.encode())
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with sending_http(url, [{"prompt": "a"}]) as send:
            with pytest.raises(Unavailable) as failed:
                await send(0, lambda: None)
    assert failed.value.reason == reason


async def test_a_key_is_not_sent_in_plaintext_to_another_machine() -> None:
    with pytest.raises(FailedPrecondition, match="plaintext"):
        async with sending_http("http://example.org", [], key="k"):
            pass
    async with sending_http("http://example.org", [], key="k", plaintext_key=True):
        pass
