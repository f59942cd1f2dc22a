"""The tokens before a position, as penalties see them: which were seen, and how often each is in the output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream.errors import OutOfRange


class TokenHistory:
    """Grows and shrinks with a session. Each distinct token owns a slot, so that a tally is two array slices."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_length = len(prompt_ids)
        self._output: list[int] = []
        distinct = list(dict.fromkeys(prompt_ids))
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        self._prompt_slots = len(distinct)

    def __len__(self) -> int:
        """Prompt and output together."""
        return self.prompt_length + len(self._output)

    def append(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            slot = self._slot(token)  # first: it may replace the array
            self._counts[slot] += 1.0
        self._output.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, prompt included. Raises OutOfRange for a length inside the prompt or
        beyond the end.
        """
        if not self.prompt_length <= length <= len(self):
            raise OutOfRange(f"length {length} is not between {self.prompt_length} (prompt) and {len(self)}.")
        kept = length - self.prompt_length
        for token in self._output[kept:]:
            self._counts[self._slots[token]] -= 1.0
        del self._output[kept:]

    def tally(
        self, path: Sequence[int] = ()
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Distinct tokens [N], how often each is in the output [N], and whether it was seen at all [N].

        `path` holds the tokens of a tree node after the history; it counts as output. Copies, so callers may keep them.
        """
        size = len(self._slots)
        extra = [token for token in dict.fromkeys(path) if token not in self._slots]
        ids = np.concatenate([self._ids[:size], np.array(extra, dtype=np.int64)])
        counts = np.concatenate([self._counts[:size], np.zeros(len(extra), dtype=np.float32)])
        for token in path:
            slot = self._slots.get(token)
            counts[size + extra.index(token) if slot is None else slot] += 1.0
        seen = counts > 0.0
        seen[: self._prompt_slots] = True
        return ids, counts, seen

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is not None:
            return slot
        slot = len(self._slots)
        if slot == len(self._ids):
            room = max(16, slot)
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
        self._slots[token] = slot
        self._ids[slot] = token
        return slot
