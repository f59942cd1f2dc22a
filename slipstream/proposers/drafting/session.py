"""One session of the drafting loop: the committed tokens of one text, and the tree proposed beyond them. Disposable.

A remote drafter and a verifier that drafts itself keep the same one; they differ in what commits, and in what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.errors import OutOfRange
from slipstream.proposers.base import ROOT, UNLIMITED, DeeperLevels, HiddenRows, ProposedNode, ProposerContext
from slipstream.proposers.draft_tree import DEEPEST, NEVER, DraftNode, DraftTree
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.structured_output import StructuredOutput

URGENT = 0.2
"""A verifier waits for a candidate only if its path is likelier than about this."""
TOGETHER_S = 0.004
"""Seconds that less urgent nodes may wait for others: a fraction of any verifier's step."""
PREPARED = 4.0
"""Nodes are proposed on paths down to so many times less likely than what the verifier wants to be sent."""
UNSENT_SHARE = 8
"""Most nodes in the tree for each node that the policy allows to be sent."""


@dataclass(slots=True)
class DraftPolicy:
    """The verifier's flow control."""

    max_nodes: int
    """Most nodes that may live below the last committed token; 0 pauses drafting."""
    min_path_probability: float
    """Least path probability of a node that is worth sending."""


class HiddenSource(Protocol):
    """The target's hidden states of the session's tokens, for a method that reads them."""

    @property
    def end(self) -> int:
        """The number of the token behind the last row that came."""
        ...

    def take(self) -> tuple[HiddenRows, ...]:
        """The rows that came since the last call."""
        ...


class DraftSessionObserver:
    """Watches one session; does nothing by itself."""

    def step_ended(self, began_s: float, ended_s: float, proposed: int, sent: int) -> None:
        """Called after a step that proposed nodes and sent some; it may have begun before the last commit."""

    def tokens_committed(self, token_ids: Sequence[int], *, traced: bool = False) -> None:
        """Called before the tree's root moves along the tokens."""

    def drafting_ended(self) -> None:
        """Called when the session is closed."""


@dataclass(slots=True, eq=False)
class DraftSession:
    """Owned by the event loop; a proposer sees snapshots of it (`context`)."""

    epoch: int
    sampling: SamplingParams
    policy: DraftPolicy
    tokens: list[int]
    """Committed tokens; only appended to."""
    prompt_length: int
    max_length: int
    """Most committed tokens; no path of the tree is longer either."""
    vocabulary_size: int = UNLIMITED
    """The target's: ids that the session can have."""
    prediction: tuple[int, ...] = ()
    """Output that the client expects."""
    cache_salt: str = ""
    """Sessions of different salts share nothing that shows what the other one wrote."""
    tenant: str = ""
    """Opaque name, from the verifier's open."""
    structure: StructuredOutput | None = None
    """The grammar that the output must follow."""
    computed: int = 0
    """Leading committed tokens that the proposer has read, as far as is known; never all of them."""
    no_room: bool = False
    """Whether the proposer had no room for the session in its last step."""
    in_step: bool = False
    hidden: HiddenSource | None = None
    """Set where the method reads the target's hidden states."""
    requested: bool = True
    """Whether nodes may be proposed for the present root; a verifier's own head waits until a step is held for it."""
    level_price: Callable[[], float] = lambda: 0.0
    """Path probability below which one level more of the same call does not pay, where hidden states are read: the
    verifier waits for the whole call."""
    max_depth: int = DEEPEST
    """Most tokens beyond the committed ones that the method can propose."""
    prepared: float = PREPARED
    """Nodes are proposed on paths down to so many times less likely than what is sent."""
    together_s: float = TOGETHER_S
    """Seconds that less urgent nodes may wait for others."""
    id: str = ""
    """The gateway's session id, for logs."""
    number: int = 0
    """Names the session on its verifier's stream; no two openings of a session share it."""
    held_since: float | None = None
    """Monotonic seconds since when nodes that are worth sending wait for others; None while there are none."""
    observer: DraftSessionObserver = field(default_factory=DraftSessionObserver)
    tree: DraftTree = field(init=False)

    def __post_init__(self) -> None:
        self.tree = DraftTree(len(self.tokens))

    @property
    def pending(self) -> int:
        """Committed tokens to read; at least one, for the last one is computed together with the tree."""
        return len(self.tokens) - self.computed

    @property
    def stream(self) -> int:
        """See `DraftTree.noise_stream`."""
        return self.tree.noise_stream(self.sampling.seed, self.number, self.epoch)

    def context(
        self,
        nodes: Sequence[DraftNode],
        expand: Sequence[DraftNode],
        max_read_tokens: int,
        deeper: DeeperLevels | None = None,
    ) -> ProposerContext:
        """A snapshot for the proposer: `nodes`, parents before children, and those of them, or the root, to expand."""
        index = {id(node): number for number, node in enumerate(nodes)}
        return ProposerContext(
            handle=self,
            tokens=self.tokens,
            length=len(self.tokens),
            prompt_length=self.prompt_length,
            max_length=self.max_length,
            sampling=self.sampling,
            vocabulary_size=self.vocabulary_size,
            node_tokens=[node.token for node in nodes],
            parents=[index.get(id(node.parent), ROOT) for node in nodes],
            expand=[index.get(id(node), ROOT) for node in expand],
            max_read_tokens=max_read_tokens,
            deeper=deeper,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            prediction=self.prediction,
            structured_output=self.structure,
            noise_stream=self.stream if self.sampling.drawn else 0,
            noise_nodes=[node.number for node in expand],
            hidden=self.hidden.take() if self.hidden is not None else (),
        )

    @property
    def proposes_whole_trees(self) -> bool:
        """Whether one proposal makes the tree of a root: newer hidden states know more of what follows, and with old
        candidates in its tree a verifier would not wait for new ones."""
        return self.hidden is not None and not self.sampling.drawn

    @property
    def has_proposed_whole(self) -> bool:
        """Whether the one proposal for the present root was made or is being made: nothing else comes for it."""
        return self.proposes_whole_trees and self.tree.root.expanded

    def frontier(self, count: int) -> list[DraftNode]:
        """The nodes to expand, best first; empty when none is asked for, none can pay, or hidden states are missing:
        those up to the token before the last, which is computed in the target's next step."""
        return self._frontier(count) if self.requested else []

    @property
    def can_propose(self) -> bool:
        """Whether there is anything to expand, requested or not."""
        return bool(self._frontier(1))

    def _frontier(self, count: int) -> list[DraftNode]:
        if self.hidden is not None and self.hidden.end != len(self.tokens) - 1:
            return []
        if self.has_proposed_whole:
            return []
        room = self.policy.max_nodes - self.tree.sent_count
        if room <= 0 or self.tree.node_count >= UNSENT_SHARE * self.policy.max_nodes:
            return []
        return self.tree.frontier(min(count, room), self._least_log_prob, self._max_depth)

    def deeper(self, starts: list[DraftNode], count: int, levels: int) -> DeeperLevels | None:
        """Returns the levels to propose below the nodes that are proposed below `starts`: `levels` in all, or as many
        as pay where hidden states are read. None under the ratio rule: a node must not be there because of what was
        drawn."""
        if self.sampling.drawn:
            return None
        least = self._least_log_prob
        if self.hidden is not None:
            levels, least = self._max_depth, max(least, math.log(max(self.level_price(), NEVER)))
        return self.tree.deeper(starts, count, levels, least, self._max_depth)

    @property
    def _least_log_prob(self) -> float:
        return math.log(max(self.policy.min_path_probability / self.prepared, NEVER))

    @property
    def _max_depth(self) -> int:
        return min(self.max_depth, self.max_length - len(self.tokens))

    def commit(self, base_length: int, token_ids: list[int], *, traced: bool = False) -> None:
        """Appends `token_ids` after `base_length` committed tokens. `traced`: their round has spans of its own. Raises
        OutOfRange for a gap."""
        if base_length != len(self.tokens):
            raise OutOfRange(f"a commit on {base_length} tokens finds {len(self.tokens)} here; open again.")
        self.observer.tokens_committed(token_ids, traced=traced)
        self.tokens.extend(token_ids)
        if self.proposes_whole_trees:
            self.tree.restart(len(self.tokens))
        else:
            self.tree.commit(token_ids)
        self.held_since = -math.inf

    def join(self, places: Sequence[DraftNode], proposed: Sequence[ProposedNode]) -> None:
        """Adds what was proposed to the tree. `places`: the root that it was proposed for, then the nodes of its
        context.

        Under the coupled rule any choice is exact, so it is made for speed: every node joins the tree, those on likely
        paths are sent. What is unlikely today may be likely after the next commit, which divides every path probability
        by that of what was committed: then it is at hand, without a step. It costs the drafter a few words of memory
        and the stream nothing. Under the rule `rejection` the choice must not look at what was drawn: everything is
        sent, in the order of drawing.
        """
        if self.sampling.drawn:
            self.tree.join_drawn(places, proposed, self.policy.max_nodes)
            return
        joined = self.tree.join(places, proposed)
        if self.proposes_whole_trees:
            for node in joined:
                node.expanded = True

    def take_nodes_to_send(self, now: float, *, idle: bool = False) -> list[DraftNode]:
        """Marks as sent, and returns, the nodes to send at `now` (monotonic seconds), parents before children; none
        while they can wait for more: a frame costs more than its nodes, so only a node that a verifier may be waiting
        for is sent at once. `idle`: no step is coming that could add to them."""
        tree, policy = self.tree, self.policy
        if tree.all_sent:
            self.held_since = None
            return tree.take_sent()
        worthy = tree.worth_sending(policy.max_nodes, math.log(max(policy.min_path_probability, NEVER)))
        if worthy and not idle:
            urgent = worthy[0].path_log_prob - tree.root.path_log_prob >= math.log(URGENT)
            if self.held_since is None:
                self.held_since = now
            if not urgent and now - self.held_since < self.together_s:
                return tree.take_sent()
        self.held_since = None
        for node in worthy:
            tree.mark_sent(node)
        return tree.take_sent()
