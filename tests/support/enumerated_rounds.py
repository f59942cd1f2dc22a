"""Several rounds between a drafter and a verifier, enumerated with all their randomness.

Every outcome is visited and weighted, so what comes out is the law of the text itself, with all that keys of noise
share or do not (`tests/support/keyed_noise.py`). What holds trees, moves roots, grows, cuts, grafts, selects,
judges and names keys is the real thing; the networks are tables, and the schedule is the test's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from drafter_svc.service import DrafterLimits, Reply, VerifierStream
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.errors import SlipstreamError
from slipstream.proposers.base import Proposal, ProposedNode, ProposerContext
from slipstream.proposers.drafting.scheduler import DraftScheduler
from slipstream.proposers.drafting.session import DraftSession as Drafting
from slipstream.proposers.drafting.step import DraftStepLimits
from slipstream.proposers.node_choice import siblings
from slipstream.rpc import proto_conversion
from slipstream.speculation import noise
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.noise import Purpose
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection
from slipstream.v1 import drafter_pb2, types_pb2
from tests.support.enumeration import Draft, Law, Path, Target
from tests.support.keyed_noise import Noise, kept
from verifier_svc.acceptance.judge import RULES, VerifyInput
from verifier_svc.acceptance.result import AcceptanceResult, Choose, FloatArray
from verifier_svc.session import Session, SessionRequest
from verifier_svc.sources.flow_control import read_frame

PROMPT = [0, 1]
LIMIT = 60
SEED = 5
HOPE = -1.0
"""Path log-probability of a candidate that makes it worth while to wait for another one."""


def by_node(session: Drafting, context: ProposerContext, index: int) -> int:
    """The key of the draws below an expanded node."""
    return noise.key(context.noise_stream, context.noise_nodes[index], Purpose.DRAFT)


Keying = Callable[[Drafting, ProposerContext, int], int]


@dataclass(frozen=True, slots=True)
class Round:
    """What happens from one commit to the next; nothing of it looks at tokens that are not yet there."""

    passes: int = 2
    """Passes of the drafter before the step is planned."""
    meanwhile: int = 0
    """Passes while the verifier judges."""
    budget: int = 2
    late_commits: bool = False
    """The drafter receives the commits before only after its passes."""
    crossing: bool = False
    """They reach it while its last pass runs."""
    late_frames: bool = False
    """What the drafter sent before the step arrives while the step runs."""
    waits: bool = False
    """As the planner does: for one more pass where the likeliest leaf makes it worth while."""
    reopens: bool = False
    """The session is opened anew while the step runs, on another drafter."""
    rolls_back_to: int | None = None
    """Output tokens that are kept after the round."""


@dataclass(frozen=True, slots=True)
class World:
    rule: str
    target: Target
    drafts: Sequence[Draft]
    """Distributions of the drafters, in order."""
    rounds: Sequence[Round]
    tokens: int
    """Output tokens that are looked at."""
    last: Round = Round(passes=0)
    """What happens after `rounds` for as long as it takes."""
    width: int = 2
    expand: int = 2
    max_nodes: int = 4
    least: float = 0.0
    """Path probability below which nothing is guessed on from."""
    keying: Keying = by_node
    admits: Callable[[Session], Callable[[Path, int], bool]] | None = None
    """Which candidates the session's tree takes."""


class Table:
    """A proposer whose network is a table."""

    def __init__(self, world: World, chances: Noise) -> None:
        self._world, self._chances = world, chances

    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        return [self._answer(context) for context in contexts]

    def _answer(self, context: ProposerContext) -> Proposal:
        nodes = [node for index in range(len(context.expand)) for node in self._below(context, index)]
        return Proposal(nodes, context.length)

    def _below(self, context: ProposerContext, index: int) -> list[ProposedNode]:
        session, drafts, node = context.handle, self._world.drafts, context.expand[index]
        assert isinstance(session, Drafting)
        known = context.tokens[: context.length][len(PROMPT) :]
        q = drafts[(session.number - 1) % len(drafts)]((*known, *context.path(node)))
        assert q is not None
        key, tokens = self._world.keying(session, context, index), list[int]()
        while len(tokens) < min(self._world.width, len(q.token_ids)):
            left = q.without(tokens)
            shares = [weight / sum(left.weights) for weight in left.weights]
            tokens.append(left.token_ids[self._chances.choose((key, len(tokens)), shares)])
        return siblings(node, tokens, q)

    def close_sequence(self, handle: Hashable) -> None:
        pass


class Mailbox(list[Reply]):
    put = list.append


class Run:
    """One outcome."""

    def __init__(self, world: World, chances: Noise) -> None:
        self._world, self._chances = world, chances
        sampling = SamplingParams(seed=SEED, acceptance=world.rule)
        request = SessionRequest(
            id="s",
            number=1,
            epoch=1,
            sampling=sampling,
            prompt_length=len(PROMPT),
            max_length=LIMIT,
            stop_token_ids=frozenset(),
            max_draft_tokens=8,
        )
        self.session = Session(
            request,
            tokens=list(PROMPT),
            credit=None,
            tree=CandidateTree(PROMPT),
            history=TokenHistory(PROMPT),
        )
        self.session.tree = self._tree()
        self._loop = DraftScheduler(Table(world, chances), DraftStepLimits(512, world.expand))
        model = types_pb2.ModelInfo(vocabulary_size=len(world.target(())), max_length=LIMIT)
        self._peer = VerifierStream(self._loop, DrafterLimits(model, 4, world.max_nodes))
        self._frames = Mailbox()
        self._peer.outbox = self._frames  # type: ignore[assignment]
        self._commands: list[drafter_pb2.DraftCommand] = []
        self._number = 0
        self._open()

    def _tree(self) -> CandidateTree:
        tree = CandidateTree(self.session.tokens)
        if self._world.admits is not None:
            tree.admits = self._world.admits(self.session)
        return tree

    def text(self) -> Path:
        """All rounds happen, for where the text is cut must not depend on how much of it was accepted."""
        for now in self._world.rounds:
            self._round(now)
        while len(self.session.tokens) < len(PROMPT) + self._world.tokens:
            self._round(self._world.last)
        return tuple(self.session.tokens[len(PROMPT) :][: self._world.tokens])

    def _round(self, now: Round) -> None:
        if not now.late_commits and not now.crossing:
            self._hear()
        for left in reversed(range(now.passes)):
            self._pass(crossed=now.crossing and left == 0)
        if not now.late_frames:
            self._arrive()
        chosen = self.session.tree.select_first_created(now.budget)
        if now.waits and max(chosen.path_log_probs, default=0.0) > HOPE:
            self._pass()
            self._arrive()
            chosen = self.session.tree.select_first_created(now.budget)
        self._hear()
        if now.reopens:
            self._open()
        for _ in range(now.meanwhile):
            self._pass()
        self._arrive()
        self._judge(chosen)
        if now.rolls_back_to is not None:
            length = min(len(PROMPT) + now.rolls_back_to, len(self.session.tokens))
            del self.session.tokens[length:]
            request = self.session.request
            self.session.request = replace(request, epoch=request.epoch + 1)
            self.session.tree = self._tree()
            self._hear()
            self._open()

    def _judge(self, chosen: Selection) -> None:
        """The round's end: its acceptance result, and the commit."""
        base = len(self.session.tokens)
        walk = RULES[self.session.request.sampling.acceptance](
            VerifyInput(chosen, 0, self.session.request.sampling, base)
        )
        request = next(walk)
        output = tuple(self.session.tokens[len(PROMPT) :])
        while True:
            try:
                p = self._world.target(output + chosen.path(request.node)).copy()
                request = walk.send(self._chosen(p, request, base, chosen) if isinstance(request, Choose) else p)
            except StopIteration as stop:
                outcome: AcceptanceResult = stop.value
                break
        assert not outcome.dishonest
        tokens = [*(chosen.token_ids[node] for node in outcome.path), outcome.next_token]
        self.session.commit(tokens, base)
        self._say(commit=drafter_pb2.DraftCommit(base_length=base, token_ids=tokens))

    def _chosen(self, p: FloatArray, request: Choose, base: int, chosen: Selection) -> int:
        """The target's own token, by the noise of its position."""
        key = noise.key(SEED, base + chosen.depth(request.node), Purpose.COUPLED)
        return self._chances.choose((key, 0), p.tolist())

    def _open(self) -> None:
        """As the verifier's end of the link does it: under a number of its own, and nothing older counts."""
        if self._number:
            self._say(close=drafter_pb2.DraftClose())
            self.session.tree.forget(self._number)
        self._number += 1
        self._say(
            open=drafter_pb2.DraftOpen(
                prefix=types_pb2.Prefix(token_ids=self.session.tokens, prompt_length=len(PROMPT)),
                sampling=proto_conversion.sampling_to_proto(self.session.request.sampling),
                policy=drafter_pb2.DraftPolicy(max_nodes=100, min_path_probability=self._world.least),
                max_length=LIMIT,
            )
        )
        self._hear()

    def _say(self, **command: object) -> None:
        self._commands.append(
            drafter_pb2.DraftCommand(session=self._number, epoch=self.session.request.epoch, **command)  # type: ignore[arg-type]
        )

    def _hear(self) -> None:
        self._peer.receive(drafter_pb2.DraftRequest(commands=self._commands))
        self._commands = []

    def _pass(self, crossed: bool = False) -> None:
        requests = self._loop._schedule_step()
        answers = self._loop._run_step(requests, [])
        if crossed:
            self._hear()
        for request, answer in zip(requests, answers, strict=True):
            self._loop._deliver(request, answer)

    def _arrive(self) -> None:
        for candidates in self._frames:
            assert isinstance(candidates, types_pb2.Candidates), candidates
            if candidates.session == self._number:
                tree = self.session.tree
                size = len(self._world.target(()))
                tree.graft(read_frame(candidates, self._number, size, tree.limits, with_distributions=True))
        self._frames.clear()


def law(world: World) -> Law:
    """Distribution of the first output tokens."""
    found: Law = defaultdict(float)
    waiting: list[Path] = [()]
    while waiting:
        chances = Noise(waiting.pop())
        with kept(chances):
            found[Run(world, chances).text()] += chances.weight
        waiting += chances.alternatives
    return found
