"""A vLLM server that people run themselves, with our worker, our proposer, and a drafter that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slipstream.cli.serve import Role
from slipstream.speculation.sampling_params import SamplingParams
from tests.loopback import ANY, HOST, free_port
from tests.vllm.decoding import DRAFT, ROOT, TARGET, Case, decode, prompts, texts
from tests.vllm.system import PYTHON, READY_S

TOKENS = 48
CASES = [
    Case(prompt, SamplingParams(temperature=temperature, seed=seed), TOKENS)
    for seed, (prompt, temperature) in enumerate(zip(prompts(4), (0.0, 0.8, 1.0, 0.8), strict=True))
]


@contextmanager
def vllm_server(drafter: str) -> Iterator[str]:
    """Its address."""
    port = free_port()
    speculation = {
        "method": "custom_class",
        "model": "verifier_svc.vllm_plugin.RemoteProposer",
        "num_speculative_tokens": 6,
    }
    options = {
        "model": TARGET,
        "host": HOST,
        "port": str(port),
        "dtype": "float32",
        "max-model-len": "512",
        "kv-cache-memory-bytes": str(1 << 28),
        "worker-cls": "verifier_svc.vllm_plugin.CoupledWorker",
        "speculative-config": json.dumps(speculation),
        "additional-config": json.dumps({"slipstream_drafters": [drafter]}),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment)
    try:
        end = time.monotonic() + READY_S
        while True:
            assert process.poll() is None and time.monotonic() < end
            try:
                urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://{HOST}:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        finally:
            process.kill()


def complete(server: str, case: Case) -> list[int]:
    wanted: dict[str, Any] = {
        "model": TARGET,
        "prompt": list(case.prompt),
        "max_tokens": case.tokens,
        "temperature": case.sampling.temperature,
        "seed": case.sampling.seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server}/v1/completions", json.dumps(wanted).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


def accepted(server: str) -> float:
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:spec_decode_num_accepted_tokens_t"))


async def test_texts_of_a_vllm_server_with_our_classes_do_not_depend_on_its_drafter(embedded: Any) -> None:
    """Alone and beside others, with a drafter and when it is killed: what the embedded engine says without any."""
    plain = list(texts(decode(embedded, CASES)).values())
    drafter = Role("drafter_svc", {"DRAFTER_MODEL": DRAFT, "DRAFTER_LISTEN": ANY, "DRAFTER_DTYPE": "float32"}, PYTHON)
    address = await drafter.start()

    async def all_at_once() -> list[list[int]]:
        return await asyncio.gather(*(asyncio.to_thread(complete, server, case) for case in CASES))

    try:
        with vllm_server(address) as server:
            async with asyncio.timeout(120):
                while not await asyncio.to_thread(accepted, server):
                    assert [complete(server, case) for case in CASES] == plain
                assert await all_at_once() == plain
                together = asyncio.create_task(all_at_once())
                await asyncio.sleep(0.1)
                drafter.process.kill()
                assert await together == plain
                assert await all_at_once() == plain
    finally:
        await drafter.end()
