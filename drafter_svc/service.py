"""DrafterService: one stream for each verifier, all its sessions on it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from drafter_svc.drafter_spans import DraftTrace
from slipstream.errors import (
    BAD_COMMAND,
    NUMBER_OUT_OF_RANGE,
    TOO_MANY_ITEMS,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    SlipstreamError,
)
from slipstream.fair_shares import may_take_slot
from slipstream.proposers.draft_tree import DraftNode
from slipstream.proposers.drafting.scheduler import DraftScheduler, Subscriber
from slipstream.proposers.drafting.session import DraftPolicy, DraftSession
from slipstream.rpc import multiplexed_stream, proto_conversion
from slipstream.rpc.multiplexed_stream import ByteCounter, SendQueue, check_command_count
from slipstream.telemetry.logs import session_of
from slipstream.telemetry.tracing import Tracing
from slipstream.tokenizer.vocabulary import share_vocabulary
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2, worker_pb2

log = logging.getLogger(__name__)

Reply = types_pb2.Candidates | drafter_pb2.DraftRefusal


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """Model that the service announces, and its bounds."""

    model: types_pb2.ModelInfo
    max_sessions: int
    max_nodes: int
    gives_distribution: bool = True
    """Whether tokens can be drawn from a distribution that is sent along."""
    tracing: Tracing | None = None


class DrafterService(drafter_pb2_grpc.DrafterServiceServicer):
    def __init__(self, scheduler: DraftScheduler, limits: DrafterLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self.traffic = ByteCounter()
        """Bytes on the verifiers' streams."""

    def register(self, server: grpc.aio.Server) -> None:
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, server)

    def load(self) -> worker_pb2.WatchResponse:
        return worker_pb2.WatchResponse(sessions=len(self._scheduler), steps=self._scheduler.steps)

    async def Draft(
        self,
        requests: AsyncIterator[drafter_pb2.DraftRequest],
        context: grpc.aio.ServicerContext[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse],
    ) -> None:
        peer = VerifierStream(self._scheduler, self._limits)
        try:
            await multiplexed_stream.serve(requests, context, peer.outbox, peer.receive, pack, self.traffic)
        finally:
            peer.leave()


def pack(replies: list[Reply]) -> drafter_pb2.DraftResponse:
    return drafter_pb2.DraftResponse(
        candidates=[reply for reply in replies if isinstance(reply, types_pb2.Candidates)],
        refusals=[reply for reply in replies if isinstance(reply, drafter_pb2.DraftRefusal)],
    )


class VerifierStream:
    """One verifier's stream: its sessions by the numbers it gave them."""

    def __init__(self, scheduler: DraftScheduler, limits: DrafterLimits) -> None:
        self.outbox: SendQueue[Reply] = SendQueue()
        self._scheduler = scheduler
        self._limits = limits
        self._sessions: dict[int, DraftSession] = {}

    def receive(self, request: drafter_pb2.DraftRequest) -> None:
        check_command_count(request.commands)
        for command in request.commands:
            try:
                self._apply(command)
            except SlipstreamError as error:
                self._refuse(command.session, command.epoch, error)
            except Exception as error:  # one bad command costs one session, never the stream
                log.error("a command failed", exc_info=error, extra={"session": session_of(command, self._sessions)})
                self._refuse(command.session, command.epoch, Internal("the drafter failed; open the session again."))

    def leave(self) -> None:
        for session in self._sessions.values():
            self._scheduler.remove_session(session)
        self._sessions.clear()

    def _apply(self, command: drafter_pb2.DraftCommand) -> None:
        kind = command.WhichOneof("command")
        if kind == "open":
            self._open(command.session, command.epoch, command.open)
            return
        session = self._sessions.get(command.session)
        if session is None:
            return  # refused or closed before
        if kind == "commit":
            self._commit(session, command.commit)
        elif kind == "policy":
            session.policy = self._policy(command.policy)
            self._scheduler.session_changed(session)
        elif kind == "close":
            self._scheduler.remove_session(self._sessions.pop(command.session))
        else:
            raise InvalidArgument("the command is empty; send open, commit, policy or close.", reason=BAD_COMMAND)

    def _commit(self, session: DraftSession, commit: drafter_pb2.DraftCommit) -> None:
        if len(session.tokens) >= session.max_length:
            return  # nothing is proposed for it any more, so nothing need be kept of what follows
        if len(commit.token_ids) > session.max_length:
            raise InvalidArgument(
                "a commit has more tokens than the whole session; send the round's.", reason=TOO_MANY_ITEMS
            )
        tokens = _tokens(commit.token_ids, session.vocabulary_size)
        session.commit(commit.base_length, tokens, traced=commit.traced)
        self._scheduler.session_changed(session)

    def _open(self, number: int, epoch: int, request: drafter_pb2.DraftOpen) -> None:
        if number in self._sessions:
            raise InvalidArgument(
                "the session's number is in use on this stream; close it, or take another one.", reason=BAD_COMMAND
            )
        self._check(request)
        session = self._session(number, epoch, request)
        held, used = self._scheduler.sessions_of(request.tenant), len(self._scheduler)
        if not may_take_slot(request.tenant, held, used, self._limits.max_sessions):
            raise ResourceExhausted("the drafter has its limit of sessions; attach another one.")
        trace = self._trace(session, request)
        session.observer = trace or session.observer
        self._sessions[number] = session
        send, fail = partial(self._send_nodes, session, trace), partial(self._refuse, number, epoch)
        self._scheduler.add_session(Subscriber(session, send, fail))

    def _session(self, number: int, epoch: int, request: drafter_pb2.DraftOpen) -> DraftSession:
        sampling = proto_conversion.sampling_from_proto(request.sampling)
        if sampling.drawn and not self._limits.gives_distribution:
            raise FailedPrecondition(
                f"drafter {self._limits.model.name} samples from no distribution, which the rule "
                f"{sampling.acceptance!r} needs; use the coupled rule, which accepts as much of its proposals.",
                reason="NO_DISTRIBUTION",
            )
        return DraftSession(
            epoch=epoch,
            sampling=sampling,
            policy=self._policy(request.policy),
            tokens=_tokens(request.prefix.token_ids, self._target_size(request)),
            prompt_length=request.prefix.prompt_length,
            max_length=min(request.max_length, self._limits.model.max_length),
            vocabulary_size=self._target_size(request),
            prediction=tuple(request.prediction_token_ids),
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            structure=proto_conversion.structure_from_proto(request.structured_output),
            id=request.key.id,
            number=number,
        )

    def _trace(self, session: DraftSession, request: drafter_pb2.DraftOpen) -> DraftTrace | None:
        tracing = self._limits.tracing
        trace = None if tracing is None else tracing.join(request.trace)
        return None if trace is None else DraftTrace(trace, session, request.trace.receiver)

    def _check(self, request: drafter_pb2.DraftOpen) -> None:
        """Checks everything that needs no copy. Raises FailedPrecondition, InvalidArgument or ResourceExhausted."""
        mine, theirs, length = self._limits.model, request.target, len(request.prefix.token_ids)
        if not share_vocabulary(mine, theirs):
            raise FailedPrecondition(
                f"drafter {mine.name} has vocabulary {mine.vocabulary_fingerprint}, target {theirs.name[:64]} has "
                f"{theirs.vocabulary_fingerprint[:64]}; pair models with one tokenizer.",
                reason="VOCABULARY_MISMATCH",
            )
        if not 0 < request.prefix.prompt_length <= length < request.max_length:
            raise InvalidArgument(
                "the prefix must hold the prompt and be shorter than max_length.", reason="PROMPT_TOO_LONG"
            )
        if length >= mine.max_length:
            raise ResourceExhausted(f"the draft model holds {mine.max_length} tokens; decode without it.")
        proto_conversion.check_sizes(request.sampling)
        _tokens(proto_conversion.highest_tokens(request.sampling).values(), self._target_size(request))
        _check_hints(request)

    def _target_size(self, request: drafter_pb2.DraftOpen) -> int:
        """Ids of the target; a verifier that does not send it has a target of the same size."""
        return request.target.vocabulary_size or self._limits.model.vocabulary_size

    def _policy(self, policy: drafter_pb2.DraftPolicy) -> DraftPolicy:
        if not policy.min_path_probability >= 0.0:  # not a number either
            raise InvalidArgument("min_path_probability must be a number of at least 0.", reason=NUMBER_OUT_OF_RANGE)
        return DraftPolicy(min(policy.max_nodes, self._limits.max_nodes), policy.min_path_probability)

    def _send_nodes(self, session: DraftSession, trace: DraftTrace | None, nodes: list[DraftNode]) -> None:
        frame = session.tree.frame(nodes)
        candidates = types_pb2.Candidates(
            session=session.number,
            epoch=session.epoch,
            base_length=frame.base_length,
            generation=frame.generation,
            first_node=frame.first_node,
            token_ids=frame.token_ids,
            confidences=proto_conversion.confidences_to_proto(frame.log_probs),
            mark=None if trace is None else trace.mark(),
        )
        if any(parent != number for number, parent in enumerate(frame.parents, frame.first_node - 1)):
            candidates.parents.extend(frame.parents)
        for node in nodes:
            if node.distribution is not None:
                candidates.distributions.add(token_ids=node.distribution.token_ids, weights=node.distribution.weights)
        if trace is not None:
            trace.candidates_sent(len(nodes), candidates.ByteSize())
        self._send(candidates)

    def _refuse(self, number: int, epoch: int, error: SlipstreamError) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            self._scheduler.remove_session(session)
        failure = proto_conversion.failure_to_proto(error)
        self._send(drafter_pb2.DraftRefusal(session=number, epoch=epoch, failure=failure))

    def _send(self, reply: Reply) -> None:
        with contextlib.suppress(SlipstreamError):  # a full outbox ends the stream
            self.outbox.put(reply)


def _tokens(token_ids: Any, vocabulary_size: int) -> list[int]:
    """Raises InvalidArgument for an id that the target does not have."""
    tokens = list(token_ids)
    if tokens and max(tokens) >= vocabulary_size:
        raise InvalidArgument(
            f"a token lies outside the target's vocabulary of {vocabulary_size}.", reason="TOKEN_OUT_OF_RANGE"
        )
    return tokens


def _check_hints(request: drafter_pb2.DraftOpen) -> None:
    """Raises InvalidArgument for a prediction or a salt that no correct verifier sends."""
    prediction, target = request.prediction_token_ids, request.target
    if len(prediction) > target.max_length:
        raise InvalidArgument(
            f"the prediction has more tokens than the target's {target.max_length}; shorten it.",
            reason="PREDICTION_TOO_LONG",
        )
    if prediction and max(prediction) >= target.vocabulary_size:
        raise InvalidArgument(
            f"the prediction names a token outside the vocabulary of {target.vocabulary_size}.",
            reason="TOKEN_OUT_OF_RANGE",
        )
    if max(len(request.cache_salt.encode()), len(request.tenant.encode())) > proto_conversion.MAX_LABEL_BYTES:
        raise InvalidArgument(
            f"cache salt and tenant have at most {proto_conversion.MAX_LABEL_BYTES} bytes each.",
            reason="LABEL_TOO_LONG",
        )
