"""One role as a process of its own: started, waited for until it can serve, ended."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping

from slipstream.errors import Unavailable
from slipstream.process import ALLOCATOR, END_WITH_PARENT, FAILED, PATIENT_THREADS

READY = "ready grpc="
END_GRACE_S = 25.0
"""Longer than the gateway's own grace for its sessions, so that it can report to clients and traces before it is
killed."""
OPTIONS = {
    "VERIFIER_MODEL": "--target",
    "GATEWAY_TOKENIZER": "--target",
    "DRAFTER_MODEL": "--draft",
    "VERIFIER_LOCAL_DRAFTERS": "--drafter",
    "DRAFTER_METHOD": "--drafter",
    "VERIFIER_DTYPE": "--dtype",
    "DRAFTER_DTYPE": "--dtype",
    "VERIFIER_DRAFT_DTYPE": "--dtype",
    "VERIFIER_THREADS": "--threads",
    "VERIFIER_QUANTISATION": "--target-quantisation",
    "DRAFTER_QUANTISATION": "--draft-quantisation",
    "VERIFIER_DRAFT_QUANTISATION": "--draft-quantisation",
    "DRAFTER_TRANSLATE_FOR": "--translate",
    "VERIFIER_DRAFT_TRANSLATE": "--translate",
    "VERIFIER_ENGINE": "--engine",
    "DRAFTER_ENGINE": "--draft-engine",
    "GATEWAY_CHAT_TEMPLATE": "--chat-template",
    "GATEWAY_LISTEN": "--listen",
    "GATEWAY_HTTP": "--http",
    "GATEWAY_STORE": "--store",
}
"""Options that set these settings of the roles: errors name them."""
SETTING = re.compile(r"\b((?:GATEWAY|VERIFIER|DRAFTER)_[A-Z_]+)\b(=)?")


class Role:
    """One process: started, waited for until it can serve, ended."""

    def __init__(self, module: str, settings: Mapping[str, str], python: str = sys.executable) -> None:
        self.module = module
        self._python = python
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self.metrics = self.http = ""
        """HOST:PORT of its metrics, and of its HTTP API; empty for none."""

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The process of a role that was started."""
        assert self._process is not None
        return self._process

    async def check(self) -> None:
        """Raises Unavailable for settings with which it would not start; its log is on stderr."""
        process = await self._run({}, "--check")
        output, _ = await process.communicate()
        if process.returncode:
            cause = next(filter(None, map(cause_of, output.decode().splitlines())), "")
            raise Unavailable(cause or f"{self.module} cannot start as it is set up.")

    async def start(self, more: Mapping[str, str] | None = None) -> str:
        """Returns the address it serves at. Raises Unavailable, with its cause, where it ends before it is ready; its
        log is on stderr."""
        self._process = process = await self._run(more or {})
        assert process.stdout is not None
        cause = ""
        async for line in process.stdout:
            text = line.decode()
            cause = cause_of(text) or cause
            if text.startswith(READY):
                ready = dict(word.partition("=")[::2] for word in text.split()[1:])
                self.metrics, self.http = ready.get("metrics", ""), ready.get("http", "")
                return ready["grpc"]
        status = await process.wait()
        raise Unavailable(cause or f"{self.module} ended with status {status} before it was ready; see above.")

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """The environment of its process, without variables that only an interpreter's start reads."""
        return dict(os.environ) | dict(self._settings) | {END_WITH_PARENT: "1"} | dict(more)

    async def _run(self, more: Mapping[str, str], *options: str) -> asyncio.subprocess.Process:
        environment = ALLOCATOR | PATIENT_THREADS | self._environment(more)
        command = [self._python, "-m", self.module, *options]
        return await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )

    async def ended(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None and self._process.stdout is not None
        await self._process.stdout.read()
        return await self._process.wait()

    async def end(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), END_GRACE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def cause_of(line: str) -> str:
    """The error that a role names in this line of its output, with settings in the words of this command; empty for
    other lines."""
    if not line.startswith(FAILED):
        return ""

    def word(found: re.Match[str]) -> str:
        option = OPTIONS.get(found[1])
        return found[0] if option is None else option + (" " if found[2] else "")

    return SETTING.sub(word, line.strip().removeprefix(FAILED))
