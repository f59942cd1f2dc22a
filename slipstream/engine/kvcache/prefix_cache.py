"""Whole blocks by what is in them, so that a prompt whose beginning was computed before is not computed again.

The KV of a block depends on its tokens and on all tokens before it. So a block's name is a hash chain: the digest of
its tokens behind the digest of the block before, and the first one behind the salt, which keeps tenants apart: whoever
may not know what others wrote must not see it in a time to first token either. Only whole blocks of committed tokens
have names. A block is named by the first sequence that fills it, and what is named is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16
"""Two prefixes that differ have one name with a probability of 2^-64 at 2^32 blocks."""


class PrefixCache:
    """Named blocks of one pool."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, token_ids: Sequence[int], salt: str) -> tuple[list[int], list[bytes]]:
        """The blocks that hold the longest known beginning of the tokens, and their digests."""
        blocks: list[int] = []
        digests: list[bytes] = []
        packed = _packed(token_ids)
        size = 4 * self._block_size
        above = root(salt)
        for start in range(0, len(packed) - size + 1, size):
            above = _digest(above, packed[start : start + size])
            block = self._blocks.get(above)
            if block is None:
                break
            blocks.append(block)
            digests.append(above)
        return blocks, digests

    def name(self, block: int, above: bytes, token_ids: Sequence[int]) -> bytes:
        """The digest of a block of these tokens behind `above`; the block is found by it from now on, unless another
        one already is."""
        digest = _digest(above, _packed(token_ids))
        if digest not in self._blocks:
            self._blocks[digest] = block
            self._digests[block] = digest
        return digest

    def forget(self, block: int) -> None:
        """The block will hold something else."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._blocks[digest]


def root(salt: str) -> bytes:
    """What the first block of a sequence stands behind."""
    return _digest(b"", salt.encode())


def _digest(above: bytes, content: bytes) -> bytes:
    return blake2b(above + content, digest_size=DIGEST_BYTES).digest()


def _packed(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()
