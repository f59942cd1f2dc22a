"""A drafter's session: a mirror of the committed tokens, and the chain guessed beyond them. Disposable."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from slipstream.engine.sequence import Sequence
from slipstream.errors import OutOfRange
from slipstream.sampling import Sampling


@dataclass(slots=True)
class Policy:
    """The verifier's flow control."""

    max_nodes: int
    min_path_probability: float


@dataclass(slots=True, eq=False)
class Session:
    """`tokens` are the committed ones, then the drafted chain. Owned by the event loop; only `sequence` is the model's.

    Node n of a generation is the token at index base_length + n - 1, so a chain needs no other bookkeeping.
    """

    epoch: int
    sampling: Sampling
    policy: Policy
    tokens: list[int]
    prompt_length: int
    max_length: int
    """Committed tokens never exceed this; nor does the chain."""
    committed: int = 0
    base_length: int = 0
    generation: int = 1
    computed: int = 0
    """Leading tokens whose KV is right, once the step in flight has ended."""
    log_probs: list[float] = field(default_factory=list)
    """Of the drafted tokens, each given those before it."""
    closed: bool = False
    sequence: Sequence | None = None

    def __post_init__(self) -> None:
        self.committed = self.base_length = len(self.tokens)

    @property
    def drafted(self) -> int:
        """Nodes ahead of the committed prefix."""
        return len(self.tokens) - self.committed

    @property
    def pending(self) -> list[int]:
        """Tokens without KV yet; never empty, for the last token's KV is never needed before the next is guessed."""
        return self.tokens[self.computed :]

    @property
    def wants(self) -> bool:
        """Whether one more guess is asked for and can pay."""
        return (
            self.drafted < self.policy.max_nodes
            and len(self.tokens) < self.max_length
            and sum(self.log_probs) >= math.log(max(self.policy.min_path_probability, 1e-30))
        )

    def commit(self, base_length: int, token_ids: list[int]) -> None:
        """The verifier committed `token_ids` after `base_length` tokens. Raises OutOfRange for a gap."""
        if base_length != self.committed:
            raise OutOfRange(f"a commit on {base_length} tokens finds {self.committed} here; open again.")
        self._agree(token_ids)

    def replace(self, tokens: list[int]) -> None:
        """A new committed prefix (rollback, migration, retry); the KV that is still right is kept."""
        self.committed = 0
        self._agree(tokens)
        self._cut(len(tokens))

    def extend(self, token: int, log_prob: float) -> int:
        """One more node at the end of the chain; returns its number."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        return len(self.tokens) - self.base_length

    def _agree(self, token_ids: list[int]) -> None:
        mine = self.tokens[self.committed : self.committed + len(token_ids)]
        kept = next((i for i, (a, b) in enumerate(zip(mine, token_ids, strict=False)) if a != b), len(mine))
        stood = self.committed
        self.committed += len(token_ids)
        if kept == len(token_ids):
            del self.log_probs[:kept]
            return
        self.tokens[stood + kept :] = token_ids[kept:]
        self._leave(stood + kept)

    def _cut(self, length: int) -> None:
        del self.tokens[length:]
        self._leave(length)

    def _leave(self, kept: int) -> None:
        """The tree was left: a new generation starts at the committed end, on the KV of the first `kept` tokens."""
        self.computed = min(self.computed, kept, self.committed - 1)
        self.generation += 1
        self.base_length = self.committed
        self.log_probs.clear()
