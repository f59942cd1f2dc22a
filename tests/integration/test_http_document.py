"""The commands of docs/http.md, as they stand there, against a gateway."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.http_client import CHAT_TEMPLATE, Web, web
from tests.support.scripted_gateway import Setting

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text("utf-8")
COMMANDS = re.findall(r"```sh\n(curl .*?)```", TEXT, re.DOTALL)


@pytest.fixture
async def served(setting: Setting, tmp_path: Path) -> AsyncIterator[Web]:
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    async with AsyncExitStack() as stack:
        yield await web(setting, stack, setting.verifier(), chat_template=str(tmp_path / "chat.jinja"))


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_command_of_the_document_is_answered(served: Web, command: str) -> None:
    assert shutil.which("curl") and shutil.which("bash"), "install curl and bash: the document's commands need them"
    assert "http://127.0.0.1:8000" in command
    address = served.url
    made = await asyncio.create_subprocess_exec(
        "bash", "-c", command.replace("http://127.0.0.1:8000", address), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await asyncio.wait_for(made.communicate(), 60)
    text = printed.decode()
    assert made.returncode == 0
    if "-sN" in command:
        assert text.endswith("data: [DONE]\n\n")
        assert ("\nid: " in f"\n{text}") is ("event_ids" in command)
        assert ('"rounds": [{' in text) is ("rounds" in command)
    else:
        assert "error" not in json.loads(text)


def test_the_document_has_commands() -> None:
    assert len(COMMANDS) >= 5
