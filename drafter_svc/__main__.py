"""`python -m drafter_svc`: one drafter, configured by `DRAFTER_*`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from drafter_svc.config import DrafterConfig
from drafter_svc.proposers import Proposer
from drafter_svc.proposers.corpus import Corpus
from drafter_svc.proposers.lookup import LookupProposer, NgramText, SuffixText, Text
from drafter_svc.proposers.model import ModelProposer
from drafter_svc.scheduler import Scheduler
from drafter_svc.service import Bounds, DrafterService
from slipstream import wire
from slipstream.config import from_env
from slipstream.engine.opening import open_engine
from slipstream.engine.thread import ModelThread
from slipstream.errors import InvalidArgument
from slipstream.server import Server, run, until_signal
from slipstream.v1 import types_pb2, worker_pb2
from slipstream.worker import Identity, WorkerService

LOOKUPS = ("ngram", "suffix")
MOST = 2**31 - 1
LOOKUP_NODES = 8
"""Guesses below one node in one step."""
LEAST_SHARE = 0.05
"""A path less likely than this is not looked up any further."""


async def serve(config: DrafterConfig) -> None:
    async with ModelThread(config.threads, "draft-model") as thread:
        model, proposer = await thread.run(build, config)
        scheduler = Scheduler(proposer, thread, config.step_tokens, config.expand)
        service = DrafterService(scheduler, Bounds(model, config.max_sessions, config.max_nodes))
        worker = WorkerService(Identity(model, worker_pb2.ROLE_DRAFTER, config.method), service.load)
        server = Server([service.register, worker.register])
        address = await server.start(config.listen)
        async with asyncio.TaskGroup() as tasks:
            drafting = tasks.create_task(scheduler.run())
            await server.serving(True)
            print(f"ready grpc={address}", flush=True)
            await until_signal()
            await server.stop(config.grace_s)
            drafting.cancel()


def build(config: DrafterConfig) -> tuple[types_pb2.ModelInfo, Proposer]:
    """What the drafter guesses with, and what it says of it. Raises InvalidArgument for an unknown method."""
    if config.method == "model":
        engine = open_engine(config.model, config.dtype, config.kv_tokens)
        proposer = ModelProposer(
            engine, width=config.width, max_nodes=config.max_nodes, proposal_tokens=config.proposal_tokens
        )
        return wire.model_to_wire(engine.model), proposer
    if config.method not in LOOKUPS:
        raise InvalidArgument(f"DRAFTER_METHOD={config.method!r}; choose model, {', '.join(LOOKUPS)}.")
    corpus = Corpus(config.corpus_tokens) if config.corpus_tokens else None
    texts: dict[str, Callable[[], Text]] = {
        "ngram": NgramText,
        "suffix": lambda: SuffixText(corpus, config.width, LEAST_SHARE),
    }
    # Without a model there is no vocabulary to differ in: an empty fingerprint fits any target.
    anything = types_pb2.ModelInfo(name=config.method, vocabulary_size=MOST, max_length=MOST, dtype="none")
    return anything, LookupProposer(texts[config.method], LOOKUP_NODES)


async def main() -> None:
    await serve(from_env(DrafterConfig, "DRAFTER_"))


if __name__ == "__main__":
    run("drafter", main())
