"""What each part of speculation brings: chain, tree, tree with prepared rejections, several drafters in one tree.

usage: python -m benchmarks.ablation [PROMPTS] [TOKENS]

The shipped pair's own logits, with passes of the target stretched to PASS_S: a pass that costs the same for any
number of candidates, as that of a big model nearly does, so that the number of nodes alone decides. Tokens a pass by
nodes verified stand beside the simulation from the same logits (`benchmarks.simulation`), which has all the time it
wants to draft.

    chain           one guess a node, drafted ahead
    tree            four guesses a node, but no more nodes than are verified: rejections are not prepared for
    tree + fan-out  the system as it is: nodes ahead, also below what may replace a rejected token
    + suffix        such a drafter in the same tree
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from benchmarks.load_generator import run_load
from benchmarks.processes import ANYWHERE, MODELS
from benchmarks.prompts import request, without_loops
from benchmarks.records import Row, write
from slipstream.engine.engine import Engine, HiddenRequest, ModelOutput
from slipstream.engine.segment import Segment
from slipstream.serving.role import Role
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.target import open_target
from verifier_svc.verifier import VerifierParts, running

PASS_S = 0.060
NODES = (4, 8, 16)
TEMPERATURES = (0.0, 1.0)
CHAIN = {"DRAFTER_WIDTH": "1", "DRAFTER_EXPAND": "1"}
VARIANTS: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "chain": (("model",), CHAIN),
    "tree": (("model",), {}),
    "tree + fan-out": (("model",), {}),
    "tree + fan-out, + suffix": (("model", "suffix"), {}),
}
BARE = "tree"


def stretched(config: VerifierConfig) -> Engine:
    """The target, whose passes take PASS_S whatever they hold."""
    engine = open_target(config)
    forward = engine.forward

    def slow(segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        end = time.perf_counter() + PASS_S
        output = forward(segments, hidden)
        time.sleep(max(0.0, end - time.perf_counter()))
        return output

    engine.forward = slow  # type: ignore[method-assign]
    return engine


@asynccontextmanager
async def system(variant: str, nodes: int) -> AsyncIterator[str]:
    """The gateway's address; the verifier runs in this process."""
    kinds, settings = VARIANTS[variant]
    more = {"DRAFTER_MAX_NODES": str(nodes)} if variant == BARE else {}
    target = str(MODELS / "target")
    config = VerifierConfig(model=target, dtype="float32", listen=ANYWHERE, grace_s=0.0)
    async with running(config, VerifierParts(opening=stretched)) as verifier:
        drafters = {
            kind: Role(
                "drafter_svc",
                {"DRAFTER_MODEL": str(MODELS / "draft"), "DRAFTER_METHOD": kind, "DRAFTER_LISTEN": ANYWHERE}
                | dict(settings)
                | more,
            )
            for kind in kinds
        }
        gateway = Role("gateway", {"GATEWAY_LISTEN": ANYWHERE})
        try:
            known = [f"{kind}={await role.start()}" for kind, role in drafters.items()]
            yield await gateway.start(
                {
                    "GATEWAY_VERIFIERS": verifier.address,
                    "GATEWAY_DRAFTERS": ",".join(known),
                    "GATEWAY_TOKENIZER": target,
                    "GATEWAY_MAX_DRAFT_TOKENS": str(nodes),
                }
            )
        finally:
            for role in (gateway, *drafters.values()):
                await role.end()


async def main(count: int, tokens: int) -> None:
    async with system("chain", 4) as server:
        prompts = await without_loops(server, count, tokens)
    rows: list[Row] = []
    for variant in VARIANTS:
        for nodes in NODES:
            async with system(variant, nodes) as server:
                for temperature in TEMPERATURES:
                    requests = [
                        request(prompt, tokens, speculate=True, temperature=temperature, seed=seed)
                        for seed, prompt in enumerate(prompts)
                    ]
                    report = (await run_load(server, requests, 1)).report()
                    rows.append(
                        {
                            "variant": variant,
                            "nodes": nodes,
                            "T": temperature,
                            "tokens / pass": report["tokens_per_round"],
                            "hit rate": report["hit_rate"],
                            "acceptance length": report["acceptance_length"],
                            "tok/s": report["tokens_per_s"],
                        }
                    )
                    print(rows[-1], flush=True)
    write("ablation", f"python -m benchmarks.ablation {count} {tokens}", rows)


if __name__ == "__main__":
    asyncio.run(main(*(int(argument) for argument in sys.argv[1:3]) if sys.argv[2:] else (8, 64)))
