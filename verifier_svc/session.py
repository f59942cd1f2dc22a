"""A verifier's session: the committed tokens, the candidate tree on top of them, and the KV below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.engine.kvcache.sequence import Sequence
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import verifier_pb2
from verifier_svc.grammar_constraint import GrammarConstraint
from verifier_svc.tracing import VerifyTrace

MOST_SOURCES = 64
"""Whose names are remembered: every open on a drafter is a source of its own."""
Rank = tuple[int, int]
"""Who comes first: priority, the lower the sooner, then arrival."""
Reply = verifier_pb2.Round | verifier_pb2.DrafterEvent | verifier_pb2.SessionEnd


@dataclass(frozen=True, slots=True)
class PendingRollback:
    """A rollback that waits for the step in flight."""

    epoch: int
    length: int


@dataclass(frozen=True, slots=True)
class CandidateChoice:
    """The best candidates of a tree, for as long as the tree stays as it is."""

    version: int
    limit: int
    """Most candidates asked for."""
    selection: Selection
    paths: list[float]
    """Calibrated path probabilities."""


@dataclass(slots=True, eq=False)
class Session:
    """Owned by the event loop; in a step `sequence` is the model thread's."""

    id: str
    number: int
    """The gateway's name of the session on its stream."""
    epoch: int
    sampling: SamplingParams
    tokens: list[int]
    """All committed tokens, prompt first. The last one has no KV yet: it is the root of the candidates."""
    prompt_length: int
    max_length: int
    stop_token_ids: frozenset[int]
    max_draft_tokens: int
    credit: int | None
    """Output tokens the gateway still takes; None is without limit."""
    tree: CandidateTree
    history: TokenHistory | None
    """Kept where penalties look at it."""
    say: Callable[[Reply], None]
    """To the session's gateway; never blocks, never raises."""
    workload: str = ""
    """The kind of work, for which acceptance is learned apart."""
    prediction: tuple[int, ...] = ()
    """Output the client expects; for the drafters."""
    cache_salt: str = ""
    priority: int = 0
    """The lower, the sooner it is served."""
    arrival: int = 0
    """Counts the sessions of this verifier."""
    computed: int = 0
    """Leading committed tokens whose KV is in `sequence`."""
    sequence: Sequence | None = None
    """None while it waits for room (`verifier_svc.scheduling.kv_admission`)."""
    entered: bool = False
    """Whether it ever had one."""
    in_step: bool = False
    closed: bool = False
    rewind: PendingRollback | None = None
    idle_since: float = field(default=0.0)
    """Monotonic seconds: the end of the session's last round."""
    miss: verifier_pb2.MissCause = verifier_pb2.MISS_CAUSE_OPENING
    """Why there were no candidates when the last round ended; UNSPECIFIED when there were."""
    constraint: GrammarConstraint | None = None
    """Where the output is structured."""
    structure: StructuredOutput | None = None
    """The same, for the drafters."""
    top_logprobs: int | None = None
    """Of how many likeliest tokens the gateway wants log-probabilities with each token's own; None: not even that."""
    served: bool = True
    """False: a double, on which a shadow's candidates are scored (`verifier_svc.sources.shadow`); it is in no step."""
    offer: CandidateChoice | None = None
    """What the planner made of the tree the last time it looked."""
    trace: VerifyTrace | None = None
    """Where the request is traced."""
    _sources: dict[int, str] = field(default_factory=dict)
    _labels: dict[tuple[int, ...], str] = field(default_factory=dict)
    """What `label` said, until a name changes."""

    @property
    def pending(self) -> int:
        """Committed tokens without KV; at least one."""
        return len(self.tokens) - self.computed

    @property
    def rank(self) -> Rank:
        return self.priority, self.arrival

    @property
    def runnable(self) -> bool:
        return not self.closed and not self.in_step and (self.credit is None or self.credit > 0)

    @property
    def draft_limit(self) -> int:
        """Most candidates worth verifying: beyond max_length and the credit nothing can be committed."""
        room = self.max_length - len(self.tokens)
        if self.credit is not None:
            room = min(room, self.credit)
        return max(0, min(self.max_draft_tokens, room - 1))

    def commit(self, token_ids: list[int], computed: int) -> None:
        """`token_ids` become real; the KV of the first `computed` tokens is right."""
        self.tokens.extend(token_ids)
        self.computed = computed
        if self.history is not None:
            self.history.append(token_ids)
        used = not self.tree.empty
        diverged = self.tree.commit(token_ids)
        if not self.tree.empty:
            self.miss = verifier_pb2.MISS_CAUSE_UNSPECIFIED
        elif diverged:
            self.miss = verifier_pb2.MISS_CAUSE_DIVERGED
        elif used:
            self.miss = verifier_pb2.MISS_CAUSE_EXHAUSTED
        if self.credit is not None:
            self.credit -= len(token_ids)

    def roll_back(self, epoch: int, length: int) -> None:
        """The committed prefix is `length` tokens again, under a higher epoch. Between steps only."""
        del self.tokens[length:]
        self.epoch = epoch
        self.computed = min(self.computed, length - 1)
        if self.history is not None:
            self.history.truncate(length)
        self.tree.rollback(length)
        self.miss = verifier_pb2.MISS_CAUSE_OPENING

    def name_source(self, source: int, drafter: str) -> None:
        """Candidates from this source are that drafter's."""
        self._labels = {}
        self._sources[source] = drafter
        if len(self._sources) > MOST_SOURCES:
            del self._sources[next(iter(self._sources))]

    def senders(self, sources: tuple[int, ...]) -> tuple[str, ...]:
        """Names of the drafters behind a node's sources, sorted; most often there is one."""
        return tuple(sorted({self._sources.get(source, "") for source in sources}))

    def label(self, sources: tuple[int, ...]) -> str:
        """The same as one name: that two drafters say the same is evidence of its own."""
        known = self._labels.get(sources)
        if known is None:
            known = self._labels[sources] = "+".join(self.senders(sources))
        return known
