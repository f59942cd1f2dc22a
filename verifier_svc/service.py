"""The gRPC service of a verifier: each gateway opens one stream, and all its sessions run on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial

import grpc

from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.errors import (
    BAD_COMMAND,
    DRAINING,
    OTHER_ARITHMETIC,
    Aborted,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    SlipstreamError,
    Unavailable,
)
from slipstream.fair_shares import may_take_slot
from slipstream.rpc import multiplexed_stream, proto_conversion
from slipstream.rpc.multiplexed_stream import ByteCounter, SendQueue, check_command_count
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.telemetry.logs import session_of
from slipstream.tokenizer.grammar import Grammar, Grammars
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from verifier_svc.address_allowlist import AddressAllowlist
from verifier_svc.admission import (
    check_drafters,
    check_open,
    check_prompt_logprobs,
    check_room,
    check_rule,
    check_trust,
)
from verifier_svc.grammar.compilation import CompilationListener, GrammarCompilation
from verifier_svc.grammar.constraints import Constraint, GrammarConstraint, MaskThreads, MaskWorkers
from verifier_svc.grammar.token_constraint import ReasoningBound, TokenConstraint, TokenRules
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.session import Session, SessionRequest
from verifier_svc.sources.candidate_sources import CandidateSources

log = logging.getLogger(__name__)

Reply = verifier_pb2.Round | verifier_pb2.DrafterEvent | verifier_pb2.SessionEnd


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    model: types_pb2.ModelInfo
    max_sessions: int
    max_draft_tokens: int
    kv_tokens: int
    allowed_addresses: AddressAllowlist = field(default_factory=AddressAllowlist)
    """Addresses that gateways may name as drafters."""
    lossy_rules: bool = True
    """Whether the executor runs lossy acceptance rules."""
    scores_prompts: bool = True
    """Whether the executor gives prompts' log-probabilities."""


class VerifierService(verifier_pb2_grpc.VerifierServiceServicer):
    def __init__(
        self, scheduler: Scheduler, sources: CandidateSources, limits: ServiceLimits, grammars: Grammars
    ) -> None:
        self.scheduler = scheduler
        self.sources = sources
        self.limits = limits
        self.grammars = grammars
        self.traffic = ByteCounter()
        """Bytes exchanged with gateways."""
        self.by_id: dict[str, Session] = {}
        """Sessions of all gateways. When two gateways claim one session, the lower epoch is fenced off."""
        self.masks = MaskThreads()
        self.streams: set[GatewayStream] = set()
        self.draining = False

    @property
    def session_count(self) -> int:
        """Sessions that are open, and those that will be once their grammar is compiled."""
        return len(self.scheduler) + sum(len(stream.compiling) for stream in self.streams)

    def sessions_of(self, tenant: str) -> int:
        """Number of sessions in `session_count` that are the tenant's."""
        opened = sum(session.request.tenant == tenant for session in self.by_id.values())
        return opened + sum(stream.compiling.sessions_of(tenant) for stream in self.streams)

    @property
    def progress(self) -> int:
        """A number that grows while the verifier works: steps, and what it does for grammars apart from them."""
        return self.scheduler.steps + self.masks.computed + self.grammars.compiled

    def masks_came(self, session: Session, constraint: GrammarConstraint) -> None:
        """Candidates of the session are known to be allowed or forbidden now."""
        if session.closed:
            return
        if constraint.failure is not None:
            self.scheduler.end_session(session, verifier_pb2.FINISH_REASON_ERROR, constraint.failure)
            return
        if forbidden := session.tree.recheck():
            self.sources.dropped["forbidden"] += forbidden
        self.scheduler.wake()

    def start_draining(self) -> None:
        """Refuses new sessions from now on, and ends those without KV, which lose nothing by moving."""
        self.draining = True
        for session in list(self.by_id.values()):
            if session.sequence is None:
                self.scheduler.end_session(session, verifier_pb2.FINISH_REASON_ERROR, _draining())

    def register(self, server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)

    async def Decode(
        self,
        requests: AsyncIterator[verifier_pb2.DecodeRequest],
        context: grpc.aio.ServicerContext[verifier_pb2.DecodeRequest, verifier_pb2.DecodeResponse],
    ) -> None:
        stream = GatewayStream(self)
        try:
            await multiplexed_stream.serve(requests, context, stream.outbox, stream.receive, pack, self.traffic)
        finally:
            stream.close()


def _history(token_ids: list[int], prompt_length: int) -> TokenHistory:
    history = TokenHistory(token_ids[:prompt_length])
    history.append(token_ids[prompt_length:])
    return history


def _reasoning_bound(asked: verifier_pb2.DecodeOpen) -> ReasoningBound | None:
    limit = asked.reasoning_limit
    if not asked.HasField("reasoning_limit"):
        return None
    return ReasoningBound(limit.max_tokens, limit.begin_token_id, limit.end_token_id)


def _draining() -> Unavailable:
    return Unavailable("the verifier is about to end; open the session on another one.", reason=DRAINING)


def _check_arithmetic(wanted: str, model: types_pb2.ModelInfo) -> None:
    if wanted not in ("", model.arithmetic):
        raise Unavailable(
            f"this verifier's arithmetic is {model.arithmetic}; open the session on one of {wanted[:64]}.",
            reason=OTHER_ARITHMETIC,
        )


def pack(replies: list[Reply]) -> verifier_pb2.DecodeResponse:
    return verifier_pb2.DecodeResponse(
        rounds=[reply for reply in replies if isinstance(reply, verifier_pb2.Round)],
        drafter_events=[reply for reply in replies if isinstance(reply, verifier_pb2.DrafterEvent)],
        ends=[reply for reply in replies if isinstance(reply, verifier_pb2.SessionEnd)],
    )


class GatewayStream:
    """The sessions of one gateway, by the numbers that the gateway gave them."""

    def __init__(self, service: VerifierService) -> None:
        self.outbox: SendQueue[Reply] = SendQueue()
        self._service = service
        self._sessions: dict[int, Session] = {}
        self.compiling = GrammarCompilation(
            service.grammars, CompilationListener(self._run_command, self._fail, self._receive_command)
        )
        service.streams.add(self)

    def receive(self, request: verifier_pb2.DecodeRequest) -> None:
        check_command_count(request.commands)
        for command in request.commands:
            self._receive_command(command)

    def close(self) -> None:
        """Cancels all sessions of the gateway."""
        self._service.streams.discard(self)
        self.compiling.leave()
        for session in list(self._sessions.values()):
            self._service.scheduler.end_session(session, verifier_pb2.FINISH_REASON_CANCELLED)

    def _receive_command(self, command: verifier_pb2.DecodeCommand) -> None:
        if not self.compiling.holds(command):
            self._run_command(command)

    def _run_command(self, command: verifier_pb2.DecodeCommand, grammar: Grammar | None = None) -> None:
        """`grammar` is the compiled grammar of an open with structured output."""
        try:
            if command.WhichOneof("command") == "open":
                self._open_session(command, grammar)
            else:
                self._change_session(command)
        except SlipstreamError as error:
            self._fail(command, error)
        except Exception as error:  # one bad command costs one session, never the stream
            log.error(
                "a command failed",
                exc_info=error,
                extra={
                    "session": session_of(command, {number: each.request for number, each in self._sessions.items()})
                },
            )
            self._fail(command, Internal("the verifier failed on this session's command."))

    def _change_session(self, command: verifier_pb2.DecodeCommand) -> None:
        """Carries out an attach, credit or close. The gateway closes a session that its last client has left, that was
        cancelled, whose text has ended, or that moves to another verifier (`SessionRun._leave_verifier` there). Raises
        InvalidArgument and PermissionDenied for drafters that may not be attached."""
        kind = command.WhichOneof("command")
        session = self._sessions.get(command.session)
        if session is None or session.closed or command.epoch < session.request.epoch:
            return  # ended before the command came, or fenced
        if kind == "attach":
            check_drafters(command.attach.drafters, self._service.limits.allowed_addresses)
            check_trust(session.request.sampling, command.attach.drafters)
            self._service.sources.attach_session(session, command.attach.drafters)
        elif kind == "credit":
            session.add_credit(command.credit.tokens)
            self._service.scheduler.wake()
        elif kind == "close":
            self._service.scheduler.observer.session_closed(session, command.close.length)
            self._service.scheduler.end_session(session, verifier_pb2.FINISH_REASON_CANCELLED)
        else:
            raise InvalidArgument("the command is empty; send open, attach, credit or close.", reason=BAD_COMMAND)

    def _open_session(self, command: verifier_pb2.DecodeCommand, grammar: Grammar | None) -> None:
        number, epoch, request = command.session, command.epoch, command.open
        existing = self._sessions.get(number)
        if existing is not None and not existing.closed:
            if (existing.request.id, existing.request.epoch) == (request.key.id, epoch):
                return  # a repeated open
            raise InvalidArgument(
                f"session number {number} is in use on this stream; close it first.", reason=BAD_COMMAND
            )
        if self._service.draining:
            raise _draining()
        limits = self._service.limits
        _check_arithmetic(request.arithmetic, limits.model)
        check_open(request, epoch, limits.model)
        check_drafters(request.drafters, limits.allowed_addresses)
        check_room(request.max_length, limits.kv_tokens)
        tenant, used = request.tenant, self._service.session_count
        if not may_take_slot(tenant, self._service.sessions_of(tenant), used, limits.max_sessions):
            raise ResourceExhausted("the verifier has its limit of sessions; try another one, or later.")
        sampling = proto_conversion.sampling_from_proto(request.sampling)
        check_trust(sampling, request.drafters)
        check_rule(sampling, lossy_rules=limits.lossy_rules)
        check_prompt_logprobs(request, scores_prompts=limits.scores_prompts)
        structure = proto_conversion.structure_from_proto(request.structured_output)
        least = request.min_length > len(request.prefix.token_ids)
        size = limits.model.vocabulary_size
        sampling.check_allowed(request.stop_token_ids, size, structured=structure is not None, least=least)
        if structure is not None and grammar is None:
            self.compiling.start(command, structure)
            return
        self._fence(request.key.id, epoch)
        session = self._new_session(command, sampling, structure)
        session.constraint = self._constraint(session, grammar, request)
        if session.constraint is not None:
            session.tree.admits = session.constraint.admits
        self._service.scheduler.open_session(session, request)
        self._sessions[number] = self._service.by_id[request.key.id] = session

    def _constraint(
        self, session: Session, grammar: Grammar | None, asked: verifier_pb2.DecodeOpen
    ) -> Constraint | None:
        request, drawn = session.request, session.request.sampling.drawn
        if grammar is None:
            rules = TokenRules(
                self._service.limits.model.vocabulary_size,
                asked.min_length,
                request.stop_token_ids,
                request.sampling.bad_words_ids,
                _reasoning_bound(asked),
            )
            if not rules.bind(len(session.tokens)):
                return None
            return TokenConstraint(rules, session.tokens, request.prompt_length, drawn=drawn)
        workers = MaskWorkers(self._service.masks, asyncio.get_running_loop().call_soon_threadsafe, request.tenant)
        constraint = GrammarConstraint(grammar, session.tokens[request.prompt_length :], drawn=drawn, workers=workers)
        constraint.settled = partial(self._service.masks_came, session, constraint)
        return constraint

    def _new_session(
        self, command: verifier_pb2.DecodeCommand, sampling: SamplingParams, structure: StructuredOutput | None
    ) -> Session:
        asked = command.open
        tokens, prompt_length = list(asked.prefix.token_ids), asked.prefix.prompt_length
        request = SessionRequest(
            id=asked.key.id,
            number=command.session,
            epoch=command.epoch,
            sampling=sampling,
            prompt_length=prompt_length,
            max_length=asked.max_length,
            stop_token_ids=frozenset(asked.stop_token_ids),
            max_draft_tokens=min(asked.policy.max_draft_tokens, self._service.limits.max_draft_tokens),
            stream=self,
            workload=asked.workload,
            tenant=asked.tenant,
            prediction=tuple(asked.prediction_token_ids),
            cache_salt=asked.cache_salt,
            priority=asked.priority,
            structure=structure,
            top_logprobs=asked.top_logprobs if asked.HasField("top_logprobs") else None,
        )
        return Session(
            request=request,
            tokens=tokens,
            credit=asked.credit or None,
            credit_window=asked.credit,
            tree=CandidateTree(tokens),
            history=_history(tokens, prompt_length) if sampling.penalised else None,
            top_prompt_logprobs=asked.prompt_logprobs if asked.HasField("prompt_logprobs") else None,
        )

    def _fence(self, session_id: str, epoch: int) -> None:
        """Ends a session of this id with a lower epoch. Raises Aborted for one whose epoch is as high or higher."""
        rival = self._service.by_id.get(session_id)
        if rival is None or rival.closed:
            return
        fenced = Aborted(f"session {session_id} is open here under epoch {rival.request.epoch}.", reason="FENCED")
        if epoch <= rival.request.epoch:
            raise fenced
        self._service.scheduler.end_session(rival, verifier_pb2.FINISH_REASON_ERROR, fenced)

    def _fail(self, command: verifier_pb2.DecodeCommand, error: SlipstreamError) -> None:
        session = self._sessions.get(command.session)
        if session is not None and command.WhichOneof("command") != "open":
            self._service.scheduler.end_session(session, verifier_pb2.FINISH_REASON_ERROR, error)
            return
        failure = proto_conversion.failure_to_proto(error)
        self.end(
            verifier_pb2.SessionEnd(
                session=command.session,
                epoch=command.epoch,
                reason=verifier_pb2.FINISH_REASON_ERROR,
                failure=failure,
            )
        )

    def send(self, reply: verifier_pb2.Round | verifier_pb2.DrafterEvent) -> None:
        self._put(reply)

    def end(self, end: verifier_pb2.SessionEnd) -> None:
        session = self._sessions.get(end.session)
        if session is not None and session.closed:
            del self._sessions[end.session]
            if self._service.by_id.get(session.request.id) is session:
                del self._service.by_id[session.request.id]
        self._put(end)

    def _put(self, reply: Reply) -> None:
        with contextlib.suppress(SlipstreamError):  # a full outbox ends the stream, whose end ends its sessions
            self.outbox.put(reply)
