"""WorkerService, served by drafters and verifiers alike: which model the worker runs, and how busy it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from slipstream.rpc.server import Server
from slipstream.v1 import types_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.1
DRAIN_PERIOD_S = 0.02
LAST_SEND_S = 0.5
"""Seconds for the last frames to leave the machine; peers keep their streams open."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Answer of GetModel."""

    model: types_pb2.ModelInfo
    role: worker_pb2.Role
    method: str = ""
    started_ms: int = field(default_factory=lambda: int(time.time() * 1e3))
    """Milliseconds since 1970 when the worker started."""


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """`load` returns the present load; it is called at most once in WATCH_PERIOD_S for each watcher. `costs` returns
    what the worker's steps cost; None for a drafter.

    A worker that is to end reports that it is draining, so that it gets no new sessions, and those it has may finish.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        load: Callable[[], worker_pb2.WatchResponse],
        costs: Callable[[], worker_pb2.CostTable | None] = lambda: None,
    ) -> None:
        self._identity = identity
        self._load = load
        self._costs = costs
        self.draining = False

    async def drain(self, server: Server, grace_s: float) -> None:
        """Report that the worker is draining, and stop the server when no sessions are left, or after `grace_s`.
        Gateways open the remaining sessions elsewhere when their streams break."""
        self.draining = True
        log.info("draining: sessions have %g s to finish", grace_s)
        await server.set_serving(False)
        end = asyncio.get_running_loop().time() + grace_s
        try:
            while self._load().sessions and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(DRAIN_PERIOD_S)
        finally:  # even if the loop that serves them fails meanwhile
            await server.stop(min(grace_s, LAST_SEND_S))

    def register(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def GetModel(
        self, request: worker_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetModelResponse:
        identity = self._identity
        return worker_pb2.GetModelResponse(
            model=identity.model,
            role=identity.role,
            method=identity.method,
            costs=self._costs(),
            started_unix_ms=identity.started_ms,
        )

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        latest: worker_pb2.WatchResponse | None = None
        while True:
            load = self._load()
            load.draining = self.draining
            if load != latest:
                latest = load
                yield load
            await asyncio.sleep(WATCH_PERIOD_S)
