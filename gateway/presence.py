"""What a worker runs and how busy it is, kept up to date for as long as the gateway runs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import grpc

from slipstream.client import HANDSHAKE, error_of
from slipstream.v1 import types_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

INTRODUCTION_TIMEOUT_S = 5.0
MAX_BACKOFF_S = 2.0


class Presence:
    """`model` stays known while the worker is away; `present` says whether it answers."""

    def __init__(self, address: str, channel: grpc.aio.Channel, changed: Callable[[], None]) -> None:
        self._address = address
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._changed = changed
        self.model: types_pb2.ModelInfo | None = None
        self.method = ""
        self.load = worker_pb2.WatchResponse()
        self.present = False
        self._complaint = ""

    async def run(self) -> None:
        """Ask and watch, and again with jittered backoff after every loss, until cancelled."""
        failures = 0
        while True:
            try:
                await self._introduce()
                failures = 0
                async for load in self._stub.Watch(worker_pb2.WatchRequest()):
                    self.load = load
                    self._changed()
            except grpc.RpcError as error:
                self._complain(error)
            failures += 1
            self.present = False
            self._changed()
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(MAX_BACKOFF_S, 0.05 * 2 ** min(failures, 8)))

    async def _introduce(self) -> None:
        # A worker that came back may be another one: ask again before every watch.
        answer = await self._stub.GetModel(worker_pb2.GetModelRequest(), timeout=INTRODUCTION_TIMEOUT_S)
        self.model, self.method, self.present = answer.model, answer.method, True
        self._complaint = ""
        self._changed()

    def _complain(self, error: grpc.RpcError) -> None:
        """Aloud, and once, of what only an operator can mend."""
        known = error_of(error)
        log.debug("%s does not answer: %s", self._address, known.message)
        if known.reason == HANDSHAKE and known.message != self._complaint:
            self._complaint = known.message
            log.error("%s cannot be used: %s", self._address, known.message)
