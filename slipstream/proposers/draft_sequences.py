"""KV of a draft model's sequences: begun on shared prefixes, grown step by step, closed when others need the room.

Nothing is reserved for tokens that may never come, so a large `max_tokens` costs nothing until it is used. When the
blocks run out, the sequences that no step used for the longest time are closed first; they are computed again when
their turn comes. What still finds no room drafts nothing until something changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from slipstream.engine.engine import Engine
from slipstream.engine.segment import KVSequence
from slipstream.errors import ResourceExhausted
from slipstream.tokenizer.vocabulary import common_prefix

UNKNOWN = 0
"""Read in place of a token that the draft model has no embedding for."""
IDLE_STEPS = 64
"""A sequence that so many steps did not use may be closed for another one. Fewer would make two sequences, of which one
fits, compute each other's prompt again and again."""


@dataclass(slots=True)
class _HeldSequence:
    sequence: KVSequence
    tokens: list[int]
    """The list whose beginning the rows hold."""
    step: int
    """The last step that used it."""


class DraftSequences:
    """The engine's sequences by handle. Used on the model's thread."""

    def __init__(self, engine: Engine) -> None:
        """The engine is the proposer's own: its rows are not batch-invariant from now on. A guess may differ from pass
        to pass, and a deeper level computes its new rows alone, which a batch-invariant engine refuses."""
        engine.batch_invariant = False
        self._kv = engine.kv
        self.vocabulary_size = engine.model.vocabulary_size
        """The draft's own: tokens from there on are the target's alone, in its padding."""
        self._held: dict[Hashable, _HeldSequence] = {}
        """Least recently used first."""
        self._step = 0

    def begin_step(self) -> None:
        self._step += 1

    def hold(self, handle: Hashable, tokens: list[int], length: int, cache_salt: str) -> KVSequence:
        """The handle's sequence, whose rows hold a beginning of `tokens[:length]` without the last of them: that is
        computed together with the candidates below it.

        The same list is only appended to; another one, as a translated text is, is compared with what the rows hold.
        """
        held = self._held.pop(handle, None)
        if held is None:
            held = _HeldSequence(self._kv.begin(tokens[:length], cache_salt), tokens, self._step)
        self._held[handle] = held
        held.step = self._step
        sequence = held.sequence
        kept = min(sequence.length, length - 1)
        if held.tokens is not tokens:
            kept = common_prefix(sequence.tokens[:kept], tokens[:kept])
            held.tokens = tokens
        self.roll_back(sequence, kept)
        return sequence

    def grow(self, sequence: KVSequence, count: int, *, needed: bool = True) -> bool:
        """Makes room to write `count` more tokens; False where there is none now.

        Where even an empty cache could not hold them it raises ResourceExhausted, or returns False for tokens that are
        not `needed`.
        """
        blocks = -(-(sequence.length + count) // self._kv.block_size)
        if blocks > self._kv.blocks_total:
            if not needed:
                return False
            raise ResourceExhausted(
                f"the session needs {blocks} KV blocks, here are {self._kv.blocks_total}; decode without it.",
                reason="KV_EXHAUSTED",
            )
        missing = self._kv.missing(sequence, count)
        if missing > self._kv.blocks_free and not self._close_idle(missing):
            return False
        self._kv.grow(sequence, count)
        return True

    def readable(self, tokens: list[int]) -> list[int]:
        """The tokens as the draft model can read them."""
        return [token if token < self.vocabulary_size else UNKNOWN for token in tokens]

    def roll_back(self, sequence: KVSequence, length: int) -> None:
        """Keeps the first `length` tokens; what a step wrote beyond them is written over."""
        if length < sequence.length:
            self._kv.rollback(sequence, length)

    def close_sequence(self, handle: Hashable) -> None:
        held = self._held.pop(handle, None)
        if held is not None:
            self._kv.close(held.sequence)

    def _close_idle(self, blocks: int) -> bool:
        """Closes idle sequences, the idlest first, until so many blocks are free. False, closing none, where all of
        them would not free enough."""
        idle = [handle for handle, held in self._held.items() if self._step - held.step >= IDLE_STEPS]
        owned = sum(self._kv.owned(self._held[handle].sequence) for handle in idle)
        if self._kv.blocks_free + owned < blocks:
            return False
        for handle in idle:
            if self._kv.blocks_free >= blocks:
                break
            self.close_sequence(handle)
        return True
