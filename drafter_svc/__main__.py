"""`python -m drafter_svc`: one drafter, configured by `DRAFTER_*`."""

from __future__ import annotations

import asyncio
import sys

from drafter_svc.config import DrafterConfig
from drafter_svc.proposers.model import ModelProposer
from drafter_svc.scheduler import Scheduler
from drafter_svc.service import Bounds, DrafterService
from slipstream import wire
from slipstream.config import from_env
from slipstream.engine.opening import open_engine
from slipstream.engine.thread import ModelThread
from slipstream.errors import SlipstreamError
from slipstream.server import Server, until_signal
from slipstream.v1 import worker_pb2
from slipstream.worker import Identity, WorkerService


async def serve(config: DrafterConfig) -> None:
    async with ModelThread(config.threads, "draft-model") as thread:
        engine = await thread.run(open_engine, config.model, config.dtype, config.kv_tokens)
        model = wire.model_to_wire(engine.model)
        scheduler = Scheduler(ModelProposer(engine, config.proposal_tokens), thread, config.step_tokens)
        service = DrafterService(scheduler, Bounds(model, config.max_sessions, config.max_nodes))
        worker = WorkerService(Identity(model, worker_pb2.ROLE_DRAFTER, "model"), service.load)
        server = Server([service.register, worker.register])
        address = await server.start(config.listen)
        async with asyncio.TaskGroup() as tasks:
            drafting = tasks.create_task(scheduler.run())
            await server.serving(True)
            print(f"ready grpc={address}", flush=True)
            await until_signal()
            await server.stop(config.grace_s)
            drafting.cancel()


if __name__ == "__main__":
    try:
        asyncio.run(serve(from_env(DrafterConfig, "DRAFTER_")))
    except SlipstreamError as error:
        sys.exit(f"drafter: {error.message}")
