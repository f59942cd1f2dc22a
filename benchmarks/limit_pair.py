"""How near one stream of real models comes to its limit: tokens a step over the time of a pass alone.

usage: python -m benchmarks.limit_pair [REPEATS] [DTYPE]     (default: 3, auto; else float32 or bfloat16)

The target inflated to 321 M parameters and the shipped draft model beside a suffix lookup, both in the verifier's
process, as `slipstream serve` places them on two cores. First passes of each number of tokens are timed with nothing
beside them; then held-out prompts are continued one after another, with candidates and without in turn, on the
verifier's own stream. A continuation lasts from the end of its prompt's pass to the end of its last pass. The share of
the limit is what its passes would take alone over what it lasted: the rest is judging, choosing, handing over, waiting,
and the draft model's passes on the same cores.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.forward import pass_behind
from benchmarks.peers.__main__ import chosen
from benchmarks.peers.disturbance import Watch
from benchmarks.processes import ANYWHERE, INFLATED, MODELS, inflate
from benchmarks.records import Row, write
from benchmarks.virtual import decode_request
from slipstream.engine.engine import Engine, HiddenRequest, ModelOutput
from slipstream.engine.segment import Segment
from slipstream.process import ALLOCATOR, PATIENT_THREADS, tune_runtime
from slipstream.rpc.channel import channel
from slipstream.v1 import verifier_pb2, verifier_pb2_grpc
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.target import open_target
from verifier_svc.verifier import VerifierParts, running

METHODS = ("model", "suffix")
PROMPTS, TOKENS = 8, 48
NODES = 8
"""Candidates of a step, which is the gateway's default."""
SIZES = range(1, NODES + 3)
"""Tokens of a pass that are timed alone. The last token of a step is computed in the next one."""
TRIES = 25
CONTEXT = 88
"""Tokens before a timed pass: a prompt's and half of its continuation's."""


@dataclass(frozen=True, slots=True)
class PassSeen:
    tokens: int
    prompt: bool
    """Whether it is the first pass of a continuation."""
    ended: float


@dataclass(slots=True)
class Passes:
    """What the engine computed, and what passes take alone: seconds by SIZES."""

    alone: list[float] = field(default_factory=list)
    seen: list[PassSeen] = field(default_factory=list)

    def open(self, config: VerifierConfig) -> Engine:
        """The verifier's engine, watched. Runs on the model's thread."""
        engine = open_target(config)
        self.alone = timed_alone(engine)
        forward = engine.forward

        def watched(segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
            output = forward(segments, hidden)
            tokens = sum(len(each.pending) + len(each.nodes) for each in segments)
            prompt = any(each.sequence.length == 0 for each in segments)
            self.seen.append(PassSeen(tokens, prompt, time.perf_counter()))
            return output

        engine.forward = watched  # type: ignore[method-assign]
        return engine


def timed_alone(engine: Engine) -> list[float]:
    """The median seconds of passes of SIZES tokens, in turn."""
    sequence = engine.kv.begin_unshared(CONTEXT + max(SIZES))
    run = pass_behind(engine, sequence, CONTEXT)
    taken: dict[int, list[float]] = {tokens: [] for tokens in SIZES}
    for _ in range(TRIES):
        for tokens in SIZES:
            began = time.perf_counter()
            run(tokens)
            taken[tokens].append(time.perf_counter() - began)
    engine.kv.close(sequence)
    return [statistics.median(taken[tokens]) for tokens in SIZES]


def share_of_limit(passes: Sequence[PassSeen], alone: Sequence[float]) -> tuple[float, float]:
    """What the passes after prompts would take alone over what they lasted, and the seconds that they lasted."""
    least = lasted = 0.0
    for before, one in itertools.pairwise(passes):
        if not one.prompt:
            least += alone[min(bisect_left(SIZES, one.tokens), len(alone) - 1)]
            lasted += one.ended - before.ended
    return least / lasted, lasted


async def measure(client: asyncio.subprocess.Process, passes: Passes, mode: str) -> Row:
    assert client.stdin is not None and client.stdout is not None
    passes.seen.clear()
    watch = Watch()
    client.stdin.write(f"{NODES if mode == 'on' else 0}\n".encode())
    assert await client.stdout.readline(), "the client ended"
    seen, (share, seconds) = watch.seen(), share_of_limit(passes.seen, passes.alone)
    steps = sum(not one.prompt for one in passes.seen)
    tokens = PROMPTS * (TOKENS - 1)
    return {
        "speculation": mode,
        "tokens / pass": tokens / steps,
        "tok/s": tokens / seconds,
        "pass alone, ms": share * seconds / steps * 1e3,
        "step, ms": seconds / steps * 1e3,
        "share of the limit": share,
        "disturbed": "yes" if seen.disturbed else "no",
    }


async def decode(address: str, prompts: Sequence[list[int]]) -> None:
    """For each number of candidates that stdin names: continues each prompt as soon as the one before has ended, then
    writes a line."""
    drafters = [verifier_pb2.DrafterAddress(address=f"verifier:{each}", name=each) for each in METHODS]
    numbers = itertools.count()
    async with channel(address) as line:
        stream = verifier_pb2_grpc.VerifierServiceStub(line).Decode()
        while word := await asyncio.to_thread(sys.stdin.readline):
            nodes = int(word)
            for prompt in prompts:
                number = next(numbers)
                await stream.write(decode_request(number, prompt, TOKENS, nodes, drafters, cache_salt=str(number)))
                while not (await stream.read()).ends:
                    pass
            print("done", flush=True)


async def main(repeats: int, dtype: str) -> None:
    inflate()
    prompts = (await chosen(PROMPTS, TOKENS)).prompts
    passes, rows = Passes(), list[Row]()
    config = VerifierConfig(
        model=str(INFLATED),
        dtype=dtype,
        draft_dtype=dtype,
        listen=ANYWHERE,
        grace_s=0.0,
        local_drafters=tuple(f"{each}={MODELS / 'draft'}" if each == "model" else each for each in METHODS),
    )
    async with running(config, VerifierParts(opening=passes.open)) as verifier:
        tune_runtime()  # as `python -m verifier_svc` does
        command = [sys.executable, "-m", "benchmarks.limit_pair", "--load", verifier.address, json.dumps(prompts)]
        pipe = asyncio.subprocess.PIPE
        client = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        for number in range(1 + repeats):
            for mode in ("off", "on"):
                row = await measure(client, passes, mode)
                if number:  # the first run of each is not counted
                    rows.append(row)
        client.terminate()
        await client.wait()
    write(f"limit_pair_{dtype}", f"python -m benchmarks.limit_pair {repeats} {dtype}", rows)


if __name__ == "__main__":
    if not (ALLOCATOR | PATIENT_THREADS).keys() <= os.environ.keys():  # read when a process begins
        os.execve(sys.executable, sys.orig_argv, os.environ | ALLOCATOR | PATIENT_THREADS)
    if sys.argv[1:2] == ["--load"]:
        asyncio.run(decode(sys.argv[2], json.loads(sys.argv[3])))
    else:
        asyncio.run(main(int((sys.argv[1:2] or ["3"])[0]), (sys.argv[2:3] or ["auto"])[0]))
