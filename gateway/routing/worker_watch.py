"""Watches one worker for as long as the gateway runs: its model, its method, and its load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from slipstream.concurrency import Backoff
from slipstream.errors import SlipstreamError
from slipstream.rpc.channel import HANDSHAKE, error_of, parsed
from slipstream.telemetry.log_once import LogOnce
from slipstream.v1 import types_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

GET_MODEL_TIMEOUT_S = 5.0
AWAY_S = 10.0
"""A worker that has not answered for so many seconds is logged: most restarts are over by then."""


class WorkerWatch:
    """`model` stays known while the worker is away; `present` is whether it answers."""

    def __init__(self, address: str, channel: grpc.aio.Channel, changed: Callable[[], None]) -> None:
        self._address = address
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._changed = changed
        self.model: types_pb2.ModelInfo | None = None
        self.method = ""
        self.load = worker_pb2.WatchResponse()
        self.started_ms = 0
        """Milliseconds since 1970 when the worker started, by its clock."""
        self.present = False
        self._doubted = asyncio.Event()
        self._log_once = LogOnce(log, logging.ERROR)
        self._away_since: float | None = None
        """Seconds of the event loop's clock; None while it answers."""
        self._away_logged = False

    async def run(self) -> None:
        """Read model and load, and again with backoff after every loss, until cancelled."""
        backoff = Backoff()
        while True:
            try:
                await self._read_model()
                watch = self._stub.Watch(worker_pb2.WatchRequest())
                try:
                    async for load in watch:
                        self.load = parsed(load)
                        backoff.reset()
                        self._log_recovery()
                        self._changed()
                finally:
                    watch.cancel()
            except grpc.RpcError as error:
                known = error_of(error)
                self._report(known, aloud=known.reason == HANDSHAKE)
            except SlipstreamError as error:
                self._report(error, aloud=True)
            self.present = False
            self._changed()
            await backoff.wait()

    @property
    def doubtful(self) -> bool:
        """True from `doubt` until the model was read again."""
        return self._doubted.is_set()

    def doubt(self) -> None:
        """Another worker may be at the address by now: `read_again` asks."""
        self._doubted.set()

    async def read_again(self) -> None:
        """Read the model anew after each doubt, until cancelled."""
        backoff = Backoff()
        while True:
            await self._doubted.wait()
            try:
                await self._read_model()
                backoff.reset()
            except (grpc.RpcError, SlipstreamError) as error:
                log.debug("%s does not return its model: %s", self._address, error)
                await backoff.wait()

    async def _read_model(self) -> None:
        # A worker that came back may be another one: ask again before every watch.
        answer = parsed(await self._stub.GetModel(worker_pb2.GetModelRequest(), timeout=GET_MODEL_TIMEOUT_S))
        self.model, self.method, self.present = answer.model, answer.method, True
        self.started_ms = answer.started_unix_ms
        self._doubted.clear()
        self._changed()

    def _report(self, error: SlipstreamError, *, aloud: bool) -> None:
        """Log an error, once: at once what only an operator can mend (`aloud`), other errors after AWAY_S."""
        log.debug("%s does not answer: %s", self._address, error.message)
        now = asyncio.get_running_loop().time()
        self._away_since = now if self._away_since is None else self._away_since
        if aloud:
            self._log_once.log_problem(f"{self._address} cannot be used: {error.message}")
        elif now - self._away_since >= AWAY_S and not self._away_logged:
            self._away_logged = True
            log.warning("%s has not answered for %.0f s: %s", self._address, now - self._away_since, error.message)

    def _log_recovery(self) -> None:
        self._log_once.log_recovery()
        if self._away_logged:
            log.info("%s answers again", self._address)
        self._away_since, self._away_logged = None, False
