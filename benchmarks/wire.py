"""What goes over the line between a verifier and its drafter: TCP bytes per committed token, both ways.

usage: python -m benchmarks.wire

The shipped pair, T = 0.7, held-out prompts, gRPC and HTTP/2 framing included; the line is a relay that counts
(`benchmarks.delay_line`). `candidates` are the bytes of the drafter's messages alone, before framing.
"""

from __future__ import annotations

import asyncio

from benchmarks.delay_line import Line
from benchmarks.load_generator import run_load
from benchmarks.processes import ANYWHERE, MODELS
from benchmarks.prompts import held_out, request
from benchmarks.records import Row, write
from slipstream.serving.role import Role
from slipstream.v1 import drafter_pb2
from verifier_svc.config import VerifierConfig
from verifier_svc.sources.drafter_link import DrafterLink
from verifier_svc.verifier import running

SESSIONS = (1, 8, 32)
TOKENS = 64
PROMPTS = 32


class Counted:
    """Frames and bytes of messages that drafters sent to this process."""

    def __init__(self) -> None:
        self.frames = self.bytes = self.nodes = 0

    def watch(self) -> None:
        receive = DrafterLink.receive

        def counting(drafter: DrafterLink, frame: drafter_pb2.DraftResponse) -> None:
            self.frames += 1
            self.bytes += frame.ByteSize()
            self.nodes += sum(len(candidates.token_ids) for candidates in frame.candidates)
            receive(drafter, frame)

        DrafterLink.receive = counting  # type: ignore[method-assign, assignment]


async def measure(counted: Counted, sessions: int) -> Row:
    drafter = Role("drafter_svc", {"DRAFTER_MODEL": str(MODELS / "draft"), "DRAFTER_LISTEN": ANYWHERE})
    target = str(MODELS / "target")
    async with running(VerifierConfig(model=target, listen=ANYWHERE, grace_s=0.0)) as verifier:
        line = Line(await drafter.start(), 0.0)
        relay = await asyncio.start_server(line.connect, "127.0.0.1", 0)
        gateway = Role("gateway", {"GATEWAY_LISTEN": ANYWHERE})
        try:
            known = {
                "GATEWAY_VERIFIERS": verifier.address,
                "GATEWAY_DRAFTERS": f"model=127.0.0.1:{relay.sockets[0].getsockname()[1]}",
                "GATEWAY_TOKENIZER": target,
            }
            server = await gateway.start(known)
            await run_load(server, [request("import os", 16, speculate=True)], 1)
            before = line.bytes_there, line.bytes_back, counted.frames, counted.bytes, counted.nodes
            prompts = held_out(PROMPTS, characters=200, seed=3)
            requests = [
                request(prompt, TOKENS, speculate=True, temperature=0.7, seed=seed)
                for seed, prompt in enumerate(prompts)
            ]
            load = await run_load(server, requests, sessions)
            after = line.bytes_there, line.bytes_back, counted.frames, counted.bytes, counted.nodes
        finally:
            await gateway.end()
            relay.close()
            await drafter.end()
    there, back, frames, candidates, nodes = (late - early for late, early in zip(after, before, strict=True))
    return {
        "sessions": sessions,
        "tokens / round": load.report()["tokens_per_round"],
        "candidates B / token": candidates / load.tokens,
        "to the verifier B / token": back / load.tokens,
        "to the drafter B / token": there / load.tokens,
        "nodes / token": nodes / load.tokens,
        "nodes / frame": nodes / max(1, frames),
    }


async def main() -> None:
    counted = Counted()
    counted.watch()
    rows: list[Row] = []
    for sessions in SESSIONS:
        rows.append(await measure(counted, sessions))
        print(rows[-1], flush=True)
    write("wire", "python -m benchmarks.wire", rows)


if __name__ == "__main__":
    asyncio.run(main())
