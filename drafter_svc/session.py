"""A drafter's session: a mirror of the committed tokens, and the tree guessed beyond them. Disposable."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field

from drafter_svc.tracing import DraftTrace
from drafter_svc.tree import DraftNode, DraftTree
from slipstream.engine.kvcache.sequence import Sequence
from slipstream.errors import OutOfRange
from slipstream.speculation import noise
from slipstream.speculation.frame import TreeLimits
from slipstream.speculation.noise import Purpose
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.grammar import Cursor, Grammar
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.tokenizer.vocabulary import common_prefix

NEVER = 1e-9
"""A path probability below which nothing is worth a guess, whatever the policy says."""


PREPARED = 4.0
"""Guesses are made on paths down to so much less likely than what the verifier wants to be told."""
UNTOLD_SHARE = 8
"""The tree holds at most so many nodes for each that the verifier may be told."""
DEEPEST = TreeLimits().depth
"""Tokens beyond the committed ones that a verifier's tree takes: what hangs below a node that it dropped is lost."""


@dataclass(slots=True)
class DraftPolicy:
    """The verifier's flow control."""

    max_nodes: int
    min_path_probability: float


@dataclass(slots=True, eq=False)
class DraftSession:
    """Owned by the event loop; only `sequence`, `grammar` and `cursor` are the model's."""

    epoch: int
    sampling: SamplingParams
    policy: DraftPolicy
    tokens: list[int]
    """The committed ones."""
    prompt_length: int
    max_length: int
    """Committed tokens never exceed this; nor does any path of the tree."""
    prediction: tuple[int, ...] = ()
    """Output that the client expects."""
    cache_salt: str = ""
    """Sessions of different salts share nothing that could tell one what the other wrote."""
    structure: StructuredOutput | None = None
    """What the output must be."""
    grammar: Future[Grammar] | None = None
    """The same compiled, soon; the model's."""
    cursor: Cursor | None = None
    """In it; the model's."""
    computed: int = 0
    """Leading committed tokens whose KV is right, once the step in flight has ended."""
    revision: int = 0
    """Of the committed tokens: a guess made for another revision may stand on what is no more."""
    id: str = ""
    """What its gateway calls it, for logs."""
    number: int = 0
    """The verifier's name of the session on its stream; no two openings of a session share it."""
    held_since: float | None = None
    """Monotonic seconds: since when guesses that are worth telling wait for others; None while there are none."""
    closed: bool = False
    sequence: Sequence | None = None
    trace: DraftTrace | None = None
    """Where the request is traced."""
    tree: DraftTree = field(init=False)

    def __post_init__(self) -> None:
        self.tree = DraftTree(len(self.tokens))

    @property
    def pending(self) -> int:
        """Committed tokens without KV; at least one, for the last one's is computed together with the guesses."""
        return len(self.tokens) - self.computed

    @property
    def stream(self) -> int:
        """Names the noise that tokens are drawn with under the ratio rules. Each node has its own for the draws below
        it: that of this stream and its number, which counts within its generation.

        Those rules are exact if no draw that one has looked at has a say in the text after that round, and `block`
        looks at draws beyond the token with which it ends the round. Such a commit leaves the tree (the replacement is
        never the draft token it replaces), so the next generation begins, and this is why its noise is new:

        - Within an opening, a generation begins where a commit left the tree, on more tokens than all before it.
        - A drafter that restarts, reconnects or replaces another one may begin on as many tokens as a generation whose
          draws are in a step in flight; but each opening has a number of its own, or a higher epoch.
        - Another verifier may use a number again, but goes on from tokens that are committed: draws were looked at for
          those from generations on fewer tokens only. A step that never became a commit has no say in anything.
        - After a rollback to n tokens, generations on n tokens or more come again. What they once led to is void, and
          with it the only trace of their draws: tokens that stay were decided by draws of generations on fewer.

        So a stream comes again only with the same committed tokens, and then as if for the first time. `rejection` and
        `recursive` would need less: they look at no draw beyond the token that ends the round.
        """
        opening = noise.key(noise.key(self.sampling.seed, self.number, Purpose.DRAFT), self.epoch, Purpose.DRAFT)
        return noise.key(opening, self.tree.base_length, Purpose.DRAFT)

    def frontier(self, count: int) -> list[DraftNode]:
        """The nodes to guess on from, best first; empty when nothing is asked for or nothing can pay."""
        room = self.policy.max_nodes - self.tree.told_count
        if room <= 0 or self.tree.node_count >= UNTOLD_SHARE * self.policy.max_nodes:
            return []
        least = math.log(max(self.policy.min_path_probability / PREPARED, NEVER))
        return self.tree.frontier(min(count, room), least, min(DEEPEST, self.max_length - len(self.tokens)))

    def commit(self, base_length: int, token_ids: list[int]) -> None:
        """The verifier committed `token_ids` after `base_length` tokens. Raises OutOfRange for a gap."""
        if base_length != len(self.tokens):
            raise OutOfRange(f"a commit on {base_length} tokens finds {len(self.tokens)} here; open again.")
        if self.trace is not None:
            self.trace.commits(token_ids)
        self.tokens.extend(token_ids)
        self.tree.commit(token_ids)
        self.held_since = -math.inf

    def replace(self, tokens: list[int]) -> None:
        """A new committed prefix (rollback, migration, retry); the KV that is still right is kept."""
        self.computed = min(self.computed, common_prefix(self.tokens, tokens), len(tokens) - 1)
        self.tokens = tokens
        self.revision += 1
        self.tree.restart(len(tokens))
