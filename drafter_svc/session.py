"""A drafter's session: a mirror of the committed tokens, and the tree guessed beyond them. Disposable."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from drafter_svc.tree import DraftTree, Node
from slipstream.engine.sequence import Sequence
from slipstream.errors import OutOfRange
from slipstream.sampling import Sampling

NEVER = 1e-9
"""A path probability below which nothing is worth a guess, whatever the policy says."""


@dataclass(slots=True)
class Policy:
    """The verifier's flow control."""

    max_nodes: int
    min_path_probability: float


@dataclass(slots=True, eq=False)
class Session:
    """Owned by the event loop; only `sequence` is the model's."""

    epoch: int
    sampling: Sampling
    policy: Policy
    tokens: list[int]
    """The committed ones."""
    prompt_length: int
    max_length: int
    """Committed tokens never exceed this; nor does any path of the tree."""
    computed: int = 0
    """Leading committed tokens whose KV is right, once the step in flight has ended."""
    revision: int = 0
    """Of the committed tokens: a guess made for another revision may stand on what is no more."""
    closed: bool = False
    sequence: Sequence | None = None
    tree: DraftTree = field(init=False)

    def __post_init__(self) -> None:
        self.tree = DraftTree(len(self.tokens))

    @property
    def pending(self) -> int:
        """Committed tokens without KV; at least one, for the last one's is computed together with the guesses."""
        return len(self.tokens) - self.computed

    def frontier(self, count: int) -> list[Node]:
        """The nodes to guess on from, best first; empty when nothing is asked for or nothing can pay."""
        room = self.policy.max_nodes - self.tree.node_count
        if room <= 0:
            return []
        least = math.log(max(self.policy.min_path_probability, NEVER))
        return self.tree.frontier(min(count, room), least, self.max_length - len(self.tokens))

    def commit(self, base_length: int, token_ids: list[int]) -> None:
        """The verifier committed `token_ids` after `base_length` tokens. Raises OutOfRange for a gap."""
        if base_length != len(self.tokens):
            raise OutOfRange(f"a commit on {base_length} tokens finds {len(self.tokens)} here; open again.")
        self.tokens.extend(token_ids)
        self.tree.commit(token_ids)

    def replace(self, tokens: list[int]) -> None:
        """A new committed prefix (rollback, migration, retry); the KV that is still right is kept."""
        pairs = zip(self.tokens, tokens, strict=False)
        kept = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(self.tokens), len(tokens)))
        self.tokens = tokens
        self.computed = min(self.computed, kept, len(tokens) - 1)
        self.revision += 1
        self.tree.restart(len(tokens))
