"""`python -m tests.cluster.load NAMESPACE`: clients in a pod's place, by gRPC and by HTTP, until standard input ends.

Prints one JSON object: requests that are done, errors, texts that differ from the first one of the same prompt and
seed, and the longest time between two pieces of a text, in seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from typing import Any

import httpx

from slipstream.client.async_client import AsyncClient
from slipstream.client.client import RetrySettings

PROMPTS = ("def read(self, path):", "import os\n", "class Stack:\n", "for i in range(10):\n")
SEEDS = 2
TOKENS = 60
REQUEST_S = 120.0
OPTIONS: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.7}


class Load:
    def __init__(self, namespace: str) -> None:
        self._host = f"gateway.{namespace}.svc.cluster.local"
        self._over = asyncio.Event()
        self._texts: dict[tuple[str, int], str] = {}
        self.seen: dict[str, Any] = {"done": 0, "errors": Counter(), "changed": [], "longest_gap_s": 0.0}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        retry = RetrySettings(begin_anywhere=True)
        async with AsyncClient([f"dns:///{self._host}:50051"], retry=retry) as client, asyncio.TaskGroup() as group:
            group.create_task(self._worker(0, client))
            group.create_task(self._worker(1, client))
            group.create_task(self._worker(2, None))
            await loop.run_in_executor(None, sys.stdin.read)
            self._over.set()

    async def _worker(self, number: int, client: AsyncClient | None) -> None:
        """By HTTP without a client, over a connection of its own for each request, as behind a balancer."""
        turn = number
        while not self._over.is_set():
            prompt, seed = PROMPTS[turn % len(PROMPTS)], turn // len(PROMPTS) % SEEDS
            turn += 1
            try:
                async with asyncio.timeout(REQUEST_S):
                    text = await (self._http(prompt, seed) if client is None else self._grpc(client, prompt, seed))
            except Exception as error:
                self.seen["errors"][f"{type(error).__name__}: {str(error)[:200]}"] += 1
                await asyncio.sleep(0.5)
                continue
            first = self._texts.setdefault((prompt, seed), text)
            if first != text:
                self.seen["changed"].append([prompt, seed, first, text])
            self.seen["done"] += 1

    async def _grpc(self, client: AsyncClient, prompt: str, seed: int) -> str:
        text, last = "", time.monotonic()
        async for piece in client.stream(prompt, seed=seed, **OPTIONS):
            last = self._pause(last)
            text += piece.text
        return text

    async def _http(self, prompt: str, seed: int) -> str:
        body = {"prompt": prompt, "seed": seed, "stream": True, **OPTIONS}
        key = os.environ.get("SLIPSTREAM_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        text, last, ended = "", time.monotonic(), False
        url = f"http://{self._host}:8000/v1/completions"
        async with (
            httpx.AsyncClient(timeout=REQUEST_S, headers=headers) as web,
            web.stream("POST", url, json=body) as answer,
        ):
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code} {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    piece = json.loads(line.removeprefix("data: "))
                    if "error" in piece:
                        raise RuntimeError(str(piece["error"]))
                    last = self._pause(last)
                    text += "".join(choice["text"] for choice in piece["choices"])
        if not ended:
            raise RuntimeError("the stream ended without [DONE]")
        return text

    def _pause(self, last: float) -> float:
        now = time.monotonic()
        self.seen["longest_gap_s"] = max(self.seen["longest_gap_s"], round(now - last, 2))
        return now


async def main(namespace: str) -> None:
    load = Load(namespace)
    await load.run()
    print(json.dumps(load.seen))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
