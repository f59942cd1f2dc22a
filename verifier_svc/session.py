"""A session on the verifier: its committed tokens, the candidate tree on top of them, and the KV below them.

What its gateway asked for never changes (`SessionRequest`); the rest is its state. The scheduler puts sessions into
steps and commits tokens to them; a session itself neither waits nor sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.engine.segment import KVSequence
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.lookahead_window import LookaheadWindow
from slipstream.speculation.sampling_params import SamplingParams, TokenLogprobs
from slipstream.speculation.selection import Selection
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import verifier_pb2
from verifier_svc.grammar.constraints import Constraint
from verifier_svc.wait_policy.session_drafting import SessionDrafting

MAX_SOURCE_NAMES = 64
"""Sources of a session whose drafter's name is kept; every open on a drafter is a source of its own."""
Rank = tuple[int, int]
"""Order in which sessions are served: priority, the lower the sooner, then arrival."""


@dataclass(frozen=True, slots=True)
class CandidateChoice:
    """The best candidates of a tree at one version."""

    version: int
    limit: int
    """Most candidates that the choice could hold."""
    selection: Selection
    paths: list[float]
    """Calibrated path probabilities."""


class SessionStream(Protocol):
    """The stream to a session's gateway; no call blocks, and none raises."""

    def send(self, reply: verifier_pb2.Round | verifier_pb2.DrafterEvent) -> None: ...

    def end(self, end: verifier_pb2.SessionEnd) -> None:
        """Sends the end of a session and forgets the session."""
        ...


class NoStream:
    """Stream of a session that no gateway opened."""

    def send(self, reply: verifier_pb2.Round | verifier_pb2.DrafterEvent) -> None:
        """Discards it."""

    def end(self, end: verifier_pb2.SessionEnd) -> None:
        """Discards it."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """Request of a gateway's Open (`DecodeOpen`), and the stream that it came on."""

    id: str
    number: int
    """Number by which the gateway names the session on its stream."""
    epoch: int
    sampling: SamplingParams
    prompt_length: int
    max_length: int
    stop_token_ids: frozenset[int]
    max_draft_tokens: int
    stream: SessionStream = field(default_factory=NoStream)
    workload: str = ""
    """Label of the kind of work; acceptance is measured for each kind of a tenant's work apart."""
    tenant: str = ""
    """Opaque name of the API key that it belongs to (`DecodeOpen.tenant`); empty where there are no keys."""
    prediction: tuple[int, ...] = ()
    """Output that the client expects; sent to the drafters."""
    cache_salt: str = ""
    priority: int = 0
    """The lower, the sooner the session is served."""
    structure: StructuredOutput | None = None
    """Format of the structured output; sent to the drafters."""
    top_logprobs: int | None = None
    """Likeliest tokens whose log-probabilities go with each committed token's own; None: no log-probabilities."""


class DraftedSession(Protocol):
    """A session, or a shadow's double of one, as sources of candidates see it: they draft for both alike."""

    @property
    def request(self) -> SessionRequest: ...

    @property
    def tokens(self) -> list[int]:
        """All committed tokens, prompt first. The last one is the root of the candidates."""
        ...

    @property
    def tree(self) -> CandidateTree: ...

    @property
    def served(self) -> bool:
        """False for a double: no step takes its candidates, or waits for them."""
        ...

    @property
    def drafting(self) -> bool:
        """Whether drafters draft for it, as far as it is about the session."""
        ...

    def name_source(self, source: int, drafter: str) -> None:
        """Records the name of the drafter whose candidates carry the number `source`."""
        ...


@dataclass(slots=True, eq=False)
class Session:
    """The state of one request on a verifier. Owned by the event loop; while a step runs, `sequence` belongs to the
    model's thread."""

    request: SessionRequest
    tokens: list[int]
    """All committed tokens, prompt first. The last one has no KV yet: it is the root of the candidates."""
    credit: int | None
    """Output tokens that the gateway still accepts; None is without limit."""
    tree: CandidateTree
    history: TokenHistory | None
    """Token counts; None where the sampling parameters have no penalties."""
    arrival: int = 0
    """Number of the session in the order in which this verifier got them."""
    computed: int = 0
    """Leading committed tokens whose KV is in `sequence`."""
    sequence: KVSequence | None = None
    """None while the session waits for KV (`verifier_svc.scheduling.kv_admission`)."""
    admitted_once: bool = False
    """True from the first time the session got KV."""
    found_tokens: int = 0
    """Leading tokens whose KV was in the prefix cache then; 0 once they are reported."""
    credit_window: int = 0
    """Most credit that the session ever had."""
    yielded_kv: bool = False
    """True while the session is without the KV that it gave up when it had no credit."""
    in_step: bool = False
    closed: bool = False
    idle_since: float = field(default=0.0)
    """Monotonic seconds at which the session's last round ended."""
    miss: verifier_pb2.MissCause = verifier_pb2.MISS_CAUSE_OPENING
    """Why there were no candidates when the last round ended; UNSPECIFIED when there were."""
    constraint: Constraint | None = None
    """Bounds of the choice of tokens: of a structured output, or of one with a least length. None: no bounds."""
    top_prompt_logprobs: int | None = None
    """As `SessionRequest.top_logprobs` for the prompt's tokens; None once their log-probabilities were sent."""
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position in the prompt, as far as it was scored. A step that is run again writes the same again."""
    window: LookaheadWindow | None = None
    """Set while the drafter `lookahead` serves the session."""
    drafting_state: SessionDrafting = field(default_factory=SessionDrafting)
    """Whether drafting pays for the session."""
    choice: CandidateChoice | None = None
    """The planner's last choice, reused while the tree stays as it is."""
    _source_names: dict[int, str] = field(default_factory=dict)
    _labels: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Cache of `source_label`, emptied when a name changes."""

    @property
    def served(self) -> bool:
        return True

    @property
    def drafting(self) -> bool:
        return self.drafting_state.drafting

    @property
    def pending(self) -> int:
        """Committed tokens without KV; at least one."""
        return len(self.tokens) - self.computed

    @property
    def scores_prompt(self) -> bool:
        """Whether rows of the prompt are still to be scored: they have to be computed, not found in the cache."""
        scored = len(self.prompt_logprobs)
        return self.top_prompt_logprobs is not None and scored < self.request.prompt_length - 1

    @property
    def rank(self) -> Rank:
        return self.request.priority, self.arrival

    @property
    def runnable(self) -> bool:
        return not self.closed and not self.in_step and (self.credit is None or self.credit > 0)

    @property
    def low_on_credit(self) -> bool:
        """Whether the credit ends soon: it is below half of the most that the session had, and the text is longer."""
        if self.credit is None:
            return False
        return self.credit < min(self.credit_window // 2, self.request.max_length - len(self.tokens))

    def add_credit(self, tokens: int) -> None:
        if self.credit is not None:
            self.credit += tokens
            self.credit_window = max(self.credit_window, self.credit)

    @property
    def draft_limit(self) -> int:
        """Most candidates worth verifying: nothing is committed beyond max_length or the credit."""
        room = self.request.max_length - len(self.tokens)
        if self.credit is not None:
            room = min(room, self.credit)
        return max(0, min(self.request.max_draft_tokens, room - 1))

    def clip(self, token_ids: list[int]) -> tuple[list[int], verifier_pb2.FinishReason | None]:
        """Returns the tokens of a round up to the first stop token or max_length, and the reason if the session ends
        with them."""
        room = self.request.max_length - len(self.tokens)
        if not self.request.stop_token_ids.isdisjoint(token_ids):
            for index, token in enumerate(token_ids[:room]):
                if token in self.request.stop_token_ids:
                    return token_ids[: index + 1], verifier_pb2.FINISH_REASON_STOP
        if len(token_ids) >= room:
            return token_ids[:room], verifier_pb2.FINISH_REASON_LENGTH
        return token_ids, None

    def commit(self, token_ids: list[int], computed: int) -> None:
        """Appends `token_ids` to the committed tokens, the first `computed` of which have KV now."""
        self.tokens.extend(token_ids)
        self.computed = computed
        if self.history is not None:
            self.history.append(token_ids)
        if self.constraint is not None:
            self.constraint.commit(token_ids)
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

    def name_source(self, source: int, drafter: str) -> None:
        """Records the name of the drafter whose candidates carry the number `source`."""
        self._labels = {}
        self._source_names[source] = drafter
        if len(self._source_names) > MAX_SOURCE_NAMES:
            del self._source_names[next(iter(self._source_names))]

    def drafters_of(self, sources: tuple[int, ...]) -> tuple[str, ...]:
        """Sorted names of the drafters that sent a node with these sources."""
        return tuple(sorted({self._source_names.get(source, "") for source in sources}))

    def source_label(self, sources: tuple[int, ...]) -> str:
        """One label for all drafters that sent a node, because a node that two drafters sent is likelier accepted."""
        if sources not in self._labels:
            self._labels[sources] = "+".join(self.drafters_of(sources))
        return self._labels[sources]
