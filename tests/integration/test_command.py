"""The commands of clients, against a gateway: what they print, and how they end."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from slipstream import AsyncClient, Client
from slipstream.cli.commands import app
from slipstream.cli.status import _watch
from slipstream.client.gateway_endpoint import digest, new_key
from slipstream.errors import PermissionDenied
from slipstream.v1 import gateway_pb2
from tests.support.scripted_gateway import Front, Setting

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


@pytest.fixture
async def front(setting: Setting, tmp_path: Path) -> Front:
    (tmp_path / "template").write_text(TEMPLATE)
    return await setting.front(setting.verifier(), chat_template=str(tmp_path / "template"))


async def run(front: Front, *words: str, said: str = "", code: int = 0) -> str:
    command = [words[0], "--server", front.gateway.address, *words[1:]]
    result = await asyncio.to_thread(CliRunner().invoke, app, command, input=said)
    assert result.exit_code == code, result.output
    return result.stdout


async def test_a_session_is_generated_resumed_rolled_back_and_cancelled(front: Front) -> None:
    text = front.tokenizer.decode(front.verifiers[0].script[:40])
    assert await run(front, "generate", "Tell me.", "--max-tokens", "40") == text + "\n"
    whole = json.loads(await run(front, "generate", "Tell me.", "--max-tokens", "40", "--seed", "7", "--json"))
    assert (whole["text"], whole["seed"], whole["finish_reason"]) == (text, 7, "length")
    rest = json.loads(await run(front, "resume", whole["session_id"], "--offset", "30", "--json"))
    assert rest["token_ids"] == whole["token_ids"][30:]
    branch = await run(front, "rollback", whole["session_id"], "--keep", "5", "--branch")
    back = json.loads(await run(front, "rollback", whole["session_id"], "--keep", "4", "--text", "ab", "--json"))
    assert (back["session_id"], back["tokens"]) == (whole["session_id"], 4) != (branch.strip(), 4)
    assert await run(front, "cancel", branch.strip()) == ""
    told = json.loads(await run(front, "cancel", whole["session_id"], "--json"))
    assert told == {"session_id": whole["session_id"], "cancelled": True}
    assert "NO_SESSION" in (await asyncio.to_thread(failing, front, "cancel", "nobody"))


def failing(front: Front, *words: str) -> str:
    result = CliRunner().invoke(app, [words[0], "--server", front.gateway.address, *words[1:]])
    assert result.exit_code == 1
    return result.output


async def test_a_conversation_keeps_its_earlier_messages(front: Front) -> None:
    turns = ["--message", "Hi", "--message", "And?", "--system", "Be brief.", "--max-tokens", "5"]
    answer = front.tokenizer.decode(front.verifiers[0].script[:5])
    assert await run(front, "chat", *turns) == f"{answer}\n{answer}\n"
    prompts = [
        front.tokenizer.decode(opened.prefix.token_ids[: opened.prefix.prompt_length])
        for opened in front.verifiers[0].opens()
    ]
    assert prompts == [
        "<system>Be brief.<user>Hi<assistant>",
        f"<system>Be brief.<user>Hi<assistant>{answer}<user>And?<assistant>",
    ]


async def test_a_conversation_is_typed_begun_anew_and_left(front: Front) -> None:
    printed = await run(front, "chat", "--json", "--max-tokens", "5", said="Hi\n\n/reset\nHo\n/quit\nnever\n")
    answers = [json.loads(line.removeprefix("> ").lstrip("> ")) for line in printed.splitlines() if "{" in line]
    prompts = [front.tokenizer.decode(answer["prompt_token_ids"]) for answer in answers]
    assert prompts == ["<user>Hi<assistant>", "<user>Ho<assistant>"]


async def test_a_message_that_is_refused_ends_the_command_and_not_the_conversation(setting: Setting) -> None:
    front = await setting.front(setting.verifier())  # without a template
    await run(front, "chat", "--message", "Hi", code=1)
    await run(front, "chat", said="Hi\nHo\n")


async def test_the_fleet_is_shown_until_it_is_enough(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["slipstream.cli.status"], "sleep", pause)
    printed = await run(front, "status", "--watch", "--json", "--every", "0.5")
    first, second = (json.loads(line) for line in printed.splitlines())
    [worker] = first["workers"]
    assert (worker["role"], worker["present"], worker["model"]["name"]) == ("ROLE_VERIFIER", True, "toy")
    assert second["sessions"] == 0 and looks == [0.5, 0.5]
    models = json.loads(await run(front, "status", "--json"))
    assert models["models"][0]["verifiers"] == 1
    assert models["store"] == {"kind": "memory", "answers": True}
    model, arithmetic, drafter, store = (await run(front, "status")).splitlines()
    assert (model, drafter) == ("toy: 1 verifier, texts of up to 200 tokens", "  no drafter: plain decoding")
    assert store == "session store: memory, answers"
    assert arithmetic.startswith("  arithmetic ") and arithmetic.endswith(": 1, same distribution")
    assert "terminal" in await asyncio.to_thread(failing, front, "status", "--watch")


async def test_the_fleet_is_drawn_and_a_gateway_that_goes_away_is_waited_for(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, looks = io.StringIO(), [0]
    loop = asyncio.get_running_loop()

    def pause(_: float) -> None:
        looks[0] += 1
        if looks[0] == 1:
            asyncio.run_coroutine_threadsafe(front.gateway.server.stop(0), loop).result(60)
        elif looks[0] == 2:
            raise KeyboardInterrupt

    def look(as_json: bool) -> None:
        with Client(front.gateway.address) as client:
            _watch(client, 0.5, as_json, Console(file=shown, force_terminal=True, width=250))

    monkeypatch.setattr(sys.modules["slipstream.cli.status"], "sleep", pause)
    await asyncio.to_thread(look, False)
    drawn, _, gone = shown.getvalue().partition("no answer")
    assert "0 sessions here" in drawn and "verifier 127.0.0." in drawn and "[NO_GATEWAY]" in gone
    told: list[str] = []
    monkeypatch.setattr(typer, "echo", told.append)
    looks[0] = 1
    await asyncio.to_thread(look, True)
    assert json.loads(told[0])["error"]["reason"] == "NO_GATEWAY"


async def test_only_operators_may_read_the_fleet(setting: Setting, tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("tenant", "operator")}
    lines = [
        f'{name} = {{ sha256 = "{digest(key).hex()}", operator = {str(name == "operator").lower()} }}\n'
        for name, key in keys.items()
    ]
    (tmp_path / "keys.toml").write_text("".join(lines))
    front = await setting.front(setting.verifier(), api_keys=str(tmp_path / "keys.toml"))
    async with AsyncClient(front.gateway.address, api_key=keys["operator"]) as client:
        assert len((await client.fleet()).workers) == 1
    async with AsyncClient(front.gateway.address, api_key=keys["tenant"]) as client:
        with pytest.raises(PermissionDenied) as caught:
            await client.fleet()
    assert caught.value.reason == "OPERATOR"


async def test_drafters_are_in_the_fleet_with_what_keeps_them_from_work(setting: Setting) -> None:
    fits, other = await setting.drafter(), await setting.drafter(vocabulary_fingerprint="f00d")
    front = await setting.front(setting.verifier(), drafters=(f"fits={fits}", f"other={other}"))
    found: Any = gateway_pb2.GetFleetResponse()
    while not all(worker.present for worker in found.workers) or not found.workers:
        found = await front.stub.GetFleet(gateway_pb2.GetFleetRequest())
    assert {worker.name: bool(worker.problem) for worker in found.workers} == {"": False, "fits": False, "other": True}


async def test_an_interrupted_command_prints_how_to_resume_its_text(front: Front) -> None:
    front.verifiers[0].limit = 9
    command = ["generate", "Tell me.", "--server", front.gateway.address]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "slipstream", *command),
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    await process.stdout.readexactly(5)
    process.send_signal(signal.SIGINT)
    _, told = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130
    assert "`slipstream resume" in told.decode() and "`slipstream cancel" in told.decode()
