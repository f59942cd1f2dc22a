"""How near the system comes to its limit: tokens a round over the time of a pass.

usage: python -m benchmarks.limit

An emulated target of 20 ms a pass, whatever it holds, and an emulated drafter of 2 ms a pass (right in 0.8 of all
places, the truth among its next three guesses in 0.7 of the others). With passes back to back a verifier commits its
sessions' tokens a round every 20 ms: that is the limit, and whatever is lost against it is waiting, planning,
judging, talking. Taken in the middle of a run, when all sessions decode.
"""

from __future__ import annotations

import asyncio
import sys
import time

from benchmarks.records import Row, write
from benchmarks.step import client, metered

PASS_S = 0.020
TARGET = "emulated:vocabulary=4096&base_ms=20"
DRAFT = "emulated:vocabulary=4096&base_ms=2&acceptance=0.8&fanout=0.7"
SESSIONS = (1, 8, 64)
TOKENS = 2000
WARM_S, WINDOW_S = 3.0, 5.0


async def measure(sessions: int, mode: str) -> Row:
    async with metered(TARGET, DRAFT) as (address, scheduler, _):
        load = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.limit", "--load", address, str(sessions), mode
        )
        try:
            await asyncio.sleep(WARM_S)
            steps, tokens, cpu, started = scheduler.steps, scheduler.tokens, time.process_time(), time.perf_counter()
            await asyncio.sleep(WINDOW_S)
            wall = time.perf_counter() - started
            steps, tokens, cpu = scheduler.steps - steps, scheduler.tokens - tokens, time.process_time() - cpu
            assert load.returncode is None, "the run was over before the window was"
        finally:
            if load.returncode is None:
                load.terminate()
            await load.wait()
    return {
        "sessions": sessions,
        "speculation": mode,
        "tokens / session and round": tokens / steps / sessions,
        "tok/s": tokens / wall,
        "limit tok/s": tokens / steps / PASS_S,
        "share of the limit": steps * PASS_S / wall,
        "verifier CPU ms / round": cpu / steps * 1e3,
    }


async def main() -> None:
    rows = []
    for sessions in SESSIONS:
        for mode in ("off", "on"):
            rows.append(await measure(sessions, mode))
            print(rows[-1], flush=True)
    write("limit", "python -m benchmarks.limit", rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        asyncio.run(client(sys.argv[2], int(sys.argv[3]), sys.argv[4], TOKENS, 0.0))
    else:
        asyncio.run(main())
