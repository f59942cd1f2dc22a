"""How near a verifier and its drafter come to their limit: tokens a round over the time of a pass.

usage: python -m benchmarks.limit

An emulated target of 20 ms a pass, whatever it holds, and an emulated drafter of 2 ms a pass (right in 0.8 of all
places, the truth among its next three guesses in 0.7 of the others). With passes back to back a verifier commits its
sessions' tokens a round every 20 ms: that is the limit, and whatever is lost against it is waiting, planning,
judging, talking. Taken in the middle of a run, when all sessions decode. The sessions are opened on the verifier's own
stream: at 64 of them a gateway and its clients would need the cores that the drafter runs on.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

from benchmarks.processes import ANYWHERE, EMULATED_DRAFTER
from benchmarks.records import Row, write
from benchmarks.virtual import open_request
from slipstream.process import tune_runtime
from slipstream.rpc.channel import channel
from slipstream.serving.role import Role
from slipstream.v1 import verifier_pb2, verifier_pb2_grpc
from verifier_svc.config import VerifierConfig
from verifier_svc.verifier import running

PASS_S = 0.020
TARGET = "emulated:vocabulary=4096&base_ms=20"
DRAFT = "emulated:vocabulary=4096&base_ms=2&acceptance=0.8&fanout=0.7"
SESSIONS = (1, 8, 32, 64)
NODES = 8
TOKENS = 4000
WARM_S, WINDOW_S = 3.0, 2.0
WINDOWS = 5


async def measure(sessions: int, mode: str) -> Row:
    drafter = Role("drafter_svc", EMULATED_DRAFTER | {"DRAFTER_MODEL": DRAFT, "DRAFTER_LISTEN": ANYWHERE})
    config = VerifierConfig(model=TARGET, listen=ANYWHERE, grace_s=0.0, kv_tokens=1 << 20)
    async with running(config) as verifier:
        tune_runtime()  # as `python -m verifier_svc` does
        load: asyncio.subprocess.Process | None = None
        try:
            nodes = NODES if mode == "on" else 0
            arguments = [verifier.address, await drafter.start(), str(sessions), str(nodes)]
            load = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.limit", "--load", *arguments)
            await asyncio.sleep(WARM_S)
            shares, cpu = list[float](), time.process_time()
            steps, tokens = verifier.scheduler.steps, verifier.scheduler.tokens
            for _ in range(WINDOWS):
                before, started = verifier.scheduler.steps, time.perf_counter()
                await asyncio.sleep(WINDOW_S)
                wall = time.perf_counter() - started
                shares.append((verifier.scheduler.steps - before) * PASS_S / wall)
            steps, tokens = verifier.scheduler.steps - steps, verifier.scheduler.tokens - tokens
            cpu = time.process_time() - cpu
            assert load.returncode is None, "the run was over before the window was"
        finally:
            if load is not None and load.returncode is None:
                load.terminate()
                await load.wait()
            await drafter.end()
    share = statistics.median(shares)
    return {
        "sessions": sessions,
        "speculation": mode,
        "tokens / session and round": tokens / steps / sessions,
        "tok/s": tokens / steps / PASS_S * share,
        "limit tok/s": tokens / steps / PASS_S,
        "share of the limit": share,
        "least": min(shares),
        "most": max(shares),
        "verifier CPU ms / round": cpu / steps * 1e3,
    }


async def decode(verifier: str, drafter: str, sessions: int, nodes: int) -> None:
    """Opens the sessions and reads what comes, until they end."""
    address = verifier_pb2.DrafterAddress(address=drafter, name="model")
    async with channel(verifier) as line:
        stream = verifier_pb2_grpc.VerifierServiceStub(line).Decode()
        for number in range(sessions):
            await stream.write(open_request(number, TOKENS, nodes, address))
        ended = 0
        while ended < sessions:
            ended += len((await stream.read()).ends)


async def main() -> None:
    rows = []
    for sessions in SESSIONS:
        for mode in ("off", "on"):
            rows.append(await measure(sessions, mode))
            print(rows[-1], flush=True)
    write("limit", "python -m benchmarks.limit", rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        asyncio.run(decode(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
    else:
        asyncio.run(main())
