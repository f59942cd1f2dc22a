"""The README's commands for a server that runs, as they stand there, to their end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")
ASKING = re.compile(r"^((?:slipstream (?:generate|chat|status)|curl) .*?)(?:  +#.*)?$", re.MULTILINE)
COMMANDS = ASKING.findall("\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)))
FIELDS = {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
"""Bounded: what an untrained model writes into a text of any length need not end."""


async def run(command: str, servers: tuple[str, str], folder: Path) -> str:
    grpc, http = servers
    command = command.replace("http://127.0.0.1:8000", f"http://{http}")
    if command.startswith("slipstream "):
        command += f" --server {grpc}"
    if command.startswith("slipstream chat "):
        command += " --max-tokens 40"  # what an untrained model says need not end
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    made = await asyncio.create_subprocess_exec(
        "bash", "-c", command, cwd=folder, env=os.environ | {"PATH": path}, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await asyncio.wait_for(made.communicate(), 120)
    assert made.returncode == 0, command
    return printed.decode()


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_command_runs_to_its_end(command: str, servers: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("def read(self, path):")
    (tmp_path / "old.py").write_text("def read(self, path):\n    return path.read_text()\n")
    (tmp_path / "user.schema.json").write_text(json.dumps(SCHEMA))
    printed = await run(command, servers, tmp_path)
    assert printed.strip()
    if "--json-schema" in command:
        user = json.loads(printed)
        assert isinstance(user["name"], str) and isinstance(user["age"], int)


async def test_a_session_is_resumed_and_rolled_back(servers: tuple[str, str], tmp_path: Path) -> None:
    whole = json.loads(await run("slipstream generate 'def read(' --max-tokens 40 --seed 7 --json", servers, tmp_path))
    for line in re.findall(r"^(slipstream (?:resume|rollback) SESSION .*?)(?:  +#.*)?$", README, re.MULTILINE):
        printed = await run(line.replace("SESSION", whole["session_id"]), servers, tmp_path)
        if "resume" in line:
            assert printed.strip() and whole["text"].endswith(printed.strip())


def test_the_readme_has_commands_to_run() -> None:
    assert len(COMMANDS) >= 5
    assert re.search(r'OpenAI\(base_url="http://127.0.0.1:8000/v1", api_key=', README), "without a key it raises"
