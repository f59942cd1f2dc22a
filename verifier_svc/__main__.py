"""`python -m verifier_svc`: one verifier, configured by `VERIFIER_*`."""

from __future__ import annotations

import asyncio

from slipstream import wire
from slipstream.config import from_env
from slipstream.engine.engine import Engine
from slipstream.engine.opening import open_engine
from slipstream.engine.thread import ModelThread
from slipstream.server import Server, run, until_signal
from slipstream.v1 import worker_pb2
from slipstream.worker import Identity, WorkerService
from verifier_svc.config import VerifierConfig
from verifier_svc.curve import CostCurve
from verifier_svc.drafters import Drafters
from verifier_svc.measurement import measure
from verifier_svc.planner import Limits, Planner
from verifier_svc.scheduler import Scheduler
from verifier_svc.service import Bounds, VerifierService


async def serve(config: VerifierConfig) -> None:
    async with ModelThread(config.threads, "target-model") as thread:
        engine = await thread.run(open_engine, config.model, config.dtype, config.kv_tokens)
        model = wire.model_to_wire(engine.model)
        drafters = Drafters(model, config.min_path_probability)
        curve = CostCurve()
        await thread.run(measure, curve, engine, config.step_tokens, config.measure_s)
        limits = Limits(config.step_tokens, config.prefill_tokens, config.max_wait_s)
        scheduler = Scheduler(engine, thread, drafters, Planner(drafters, limits, curve))
        service = VerifierService(scheduler, drafters, Bounds(model, config.max_sessions, config.max_draft_tokens))
        identity = Identity(model, worker_pb2.ROLE_VERIFIER)
        worker = WorkerService(identity, lambda: _load(scheduler, engine))
        server = Server([service.register, worker.register])
        address = await server.start(config.listen)
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(scheduler.run()), tasks.create_task(drafters.run())]
            await server.serving(True)
            print(f"ready grpc={address}", flush=True)
            await until_signal()
            await server.stop(config.grace_s)
            for loop in loops:
                loop.cancel()


def _load(scheduler: Scheduler, engine: Engine) -> worker_pb2.WatchResponse:
    return worker_pb2.WatchResponse(
        sessions=len(scheduler),
        kv_blocks_total=engine.blocks_total,
        kv_blocks_free=engine.blocks_free,
        steps=scheduler.steps,
    )


async def main() -> None:
    await serve(from_env(VerifierConfig, "VERIFIER_"))


if __name__ == "__main__":
    run("verifier", main())
