"""Whole blocks by their contents, so that a prompt whose beginning was computed before is not computed again.

The KV of a block depends on its tokens and on all tokens before it. So its key is a hash chain: the digest of its
tokens behind the digest of the block before, the first one behind the salt. The salt keeps tenants apart: a tenant must
not learn another one's prompts from a time to first token. Only whole blocks of committed tokens have a key. The first
sequence that fills a block adds it, and a block in the cache is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16
"""At 2^32 blocks two different prefixes share a digest with a probability of 2^-64."""


class PrefixCache:
    """The blocks of one pool by their digest."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def __len__(self) -> int:
        return len(self._blocks)

    def find_prefix(self, token_ids: Sequence[int], salt: str) -> tuple[list[int], list[bytes]]:
        """The blocks that hold the longest cached beginning of the tokens, and their digests."""
        blocks: list[int] = []
        digests: list[bytes] = []
        packed = _packed(token_ids)
        size = 4 * self._block_size
        parent = salt_digest(salt)
        for start in range(0, len(packed) - size + 1, size):
            parent = _digest(parent, packed[start : start + size])
            block = self._blocks.get(parent)
            if block is None:
                break
            blocks.append(block)
            digests.append(parent)
        return blocks, digests

    def add_block(self, block: int, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Adds a block of these tokens behind the digest `parent`, unless another block has its digest already.
        Returns the digest."""
        digest = _digest(parent, _packed(token_ids))
        if digest not in self._blocks:
            self._blocks[digest] = block
            self._digests[block] = digest
        return digest

    def drop_block(self, block: int) -> None:
        """Removes a block that will hold other contents."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._blocks[digest]


def salt_digest(salt: str) -> bytes:
    """The parent digest of a sequence's first block."""
    return _digest(b"", salt.encode())


def _digest(parent: bytes, content: bytes) -> bytes:
    return blake2b(parent + content, digest_size=DIGEST_BYTES).digest()


def _packed(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()
