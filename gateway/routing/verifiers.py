"""The gateway's end of its verifiers: one multiplexed stream to each, what it runs and how busy it is."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from gateway.routing.verifier_choice import arithmetic_of
from gateway.routing.verifier_session import VerifierSession, stream_lost
from gateway.routing.worker_watch import WorkerWatch
from slipstream.errors import (
    DRAINING,
    OTHER_ARITHMETIC,
    InvalidArgument,
    ResourceExhausted,
    SlipstreamError,
    Unavailable,
)
from slipstream.rpc.channel import Dial
from slipstream.rpc.multiplexed_stream import ByteCounter, MultiplexedStream
from slipstream.telemetry.log_once import LogOnce
from slipstream.tokenizer.vocabulary import EMULATED
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2, verifier_pb2_grpc, worker_pb2

log = logging.getLogger(__name__)
DrafterFailed = Callable[[str, str, int], None]
"""Called with a drafter's name, the reason, and the number of sessions that lost it."""


class VerifierWorker:
    """Keeps one stream to a verifier and passes each round to its session. `changed` is called when the router's
    choice of a verifier may be another one."""

    def __init__(
        self,
        address: str,
        dial: Dial,
        fingerprint: str,
        changed: Callable[[], None],
        traffic: ByteCounter,
        drafter_failed: DrafterFailed,
    ) -> None:
        self.address = address
        self._drafter_failed = drafter_failed
        self._fingerprint = fingerprint
        self._changed = changed
        self._channel = dial(address)
        stub = verifier_pb2_grpc.VerifierServiceStub(self._channel)
        self._link: MultiplexedStream[
            verifier_pb2.DecodeCommand, verifier_pb2.DecodeRequest, verifier_pb2.DecodeResponse
        ]
        self._link = MultiplexedStream(stub.Decode, _pack, self, traffic=traffic)
        self._watch = WorkerWatch(address, self._channel, self._model_read)
        self._mismatch_log = LogOnce(log, logging.ERROR)
        self._sessions: dict[int, VerifierSession] = {}
        self._next = 0

    @property
    def model(self) -> types_pb2.ModelInfo | None:
        """The verifier's model; None until the verifier was reached, and if the gateway's tokenizer does not fit it."""
        return None if self.mismatch else self._watch.model

    @property
    def present(self) -> bool:
        """True while the verifier answers."""
        return self._watch.present

    @property
    def answered(self) -> bool:
        """Whether the verifier has returned its model since this gateway started."""
        return self._watch.model is not None

    @property
    def mismatch(self) -> str:
        """The reason why the verifier cannot serve, as a sentence; empty if it can."""
        model = self._watch.model
        if model is None or model.vocabulary_fingerprint == self._fingerprint:
            return ""
        if model.dtype == EMULATED or model.vocabulary_fingerprint.startswith(EMULATED):  # has no words to disagree on
            return ""
        return (
            f"Verifier {self.address} runs {model.name} with vocabulary {model.vocabulary_fingerprint}, the gateway's "
            f"tokenizer has {self._fingerprint}; set GATEWAY_TOKENIZER to the model's own."
        )

    @property
    def ready(self) -> bool:
        """Whether new sessions may be opened on the verifier."""
        known = self.model is not None and not self._watch.doubtful
        return known and self._link.up and not self._watch.load.draining

    @property
    def arithmetic(self) -> str:
        """The name of the verifier's arithmetic; empty until the verifier was reached."""
        return "" if self._watch.model is None else arithmetic_of(self._watch.model)

    @property
    def announced(self) -> str:
        """The name of its arithmetic that the verifier announces and checks; empty for an older one, which has none."""
        return "" if self._watch.model is None else self._watch.model.arithmetic

    @property
    def weights(self) -> str:
        """The revision of the verifier's model; empty until the verifier was reached."""
        return "" if self._watch.model is None else self._watch.model.revision

    @property
    def started_ms(self) -> int:
        return self._watch.started_ms

    @property
    def away(self) -> bool:
        return not self._link.up

    @property
    def sessions(self) -> int:
        """Sessions on the verifier: of all gateways as it reports them, and this gateway's own without delay."""
        return max(len(self._sessions), self._watch.load.sessions)

    @property
    def crowded(self) -> bool:
        """Whether sessions wait on the verifier for KV memory."""
        return self._watch.load.waiting > 0

    @property
    def pause_cause(self) -> str:
        """Why the verifier's drafters pause; empty while they draft."""
        return self._watch.load.drafting_paused

    @property
    def kv_usage(self) -> float:
        """Share of the verifier's KV blocks that sessions hold, from 0 to 1."""
        load = self._watch.load
        return 1 - load.kv_blocks_free / load.kv_blocks_total if load.kv_blocks_total else 0.0

    @property
    def steps(self) -> int:
        """The verifier's step counter, which grows while it works."""
        return self._watch.load.steps

    def as_fleet_worker(self) -> gateway_pb2.FleetWorker:
        return gateway_pb2.FleetWorker(
            role=worker_pb2.ROLE_VERIFIER,
            address=self.address,
            model=self._watch.model,
            present=self.present,
            problem=self.mismatch,
            load=self._watch.load,
        )

    def new_session(self) -> VerifierSession:
        """A new session on this verifier; its number is free again once the verifier has ended it."""
        assert self.model is not None
        while self._next in self._sessions:
            self._next = (self._next + 1) % 2**32
        session = VerifierSession(self._next, self._send, self.model.vocabulary_size)
        self._sessions[session.number] = session
        self._next = (self._next + 1) % 2**32
        return session

    async def run(self) -> None:
        """Keep the stream and the watch alive until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._link.run())
            tasks.create_task(self._watch.run())
            tasks.create_task(self._watch.read_again())

    async def close(self) -> None:
        await self._channel.close()

    def connected(self) -> None:
        self._watch.doubt()  # the process at this address may be another one than was asked
        self._changed()

    def receive(self, frame: verifier_pb2.DecodeResponse) -> None:
        for done in frame.rounds:
            if session := self._sessions.get(done.session):
                session.receive_round(done)
        self._report_drafter_events(frame.drafter_events)
        for end in frame.ends:
            if end.failure.reason == DRAINING:  # sooner than its Watch reports it
                self._watch.load.draining = True
            elif end.failure.reason == OTHER_ARITHMETIC:
                self._watch.doubt()
            if session := self._sessions.pop(end.session, None):
                session.receive_end(end)

    def _report_drafter_events(self, events: Iterable[verifier_pb2.DrafterEvent]) -> None:
        failures: Counter[tuple[str, str, str]] = Counter()
        for event in events:
            if event.HasField("failure"):
                failures[event.drafter, event.failure.reason, event.failure.message] += 1
            if session := self._sessions.get(event.session):
                session.receive_drafter_event(event)
        for (drafter, reason, message), count in failures.items():
            self._drafter_failed(drafter, reason, count)
            log.warning("%s: %d sessions lost drafter %s (%s): %s", self.address, count, drafter, reason, message)

    def lost(self, error: SlipstreamError) -> None:
        log.warning("lost the stream to %s: %s", self.address, error.message)
        sessions, self._sessions = self._sessions, {}
        suspects = sum(session.suspect for session in sessions.values())
        for session in sessions.values():
            session.end(stream_lost(error, 1 / suspects if session.suspect else 0.0))
        self._changed()

    def _model_read(self) -> None:
        if self.mismatch:
            self._mismatch_log.log_problem(self.mismatch)
        else:
            self._mismatch_log.log_recovery(f"verifier {self.address} fits now")
        self._changed()

    def _send(self, command: verifier_pb2.DecodeCommand) -> None:
        try:
            self._link.send(command)
        except ResourceExhausted as error:  # a peer that does not read cannot be sent anything: start over
            self._link.drop()
            raise Unavailable(error.message, reason=error.reason) from error
        except InvalidArgument:  # too large for the stream: the verifier never learns of the session
            self._sessions.pop(command.session, None)
            raise


def _pack(commands: list[verifier_pb2.DecodeCommand]) -> verifier_pb2.DecodeRequest:
    return verifier_pb2.DecodeRequest(commands=commands)
