"""Randomness that belongs to a position: a pure function of (seed, position, purpose, token id).

The `coupled` rule draws the token at a position by this noise alone, in drafter and verifier alike. So the text depends
on seed and target, and not on candidates, batches, crashes or the worker that computes it.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), read as a
counter-based generator: `key` names a stream, and token v reads the v-th output of the generator started there.
Nothing is stored: every process with the seed computes the same noise at a position, in any order.

The purpose keeps the streams apart. Coupled noise is shared by drafter and verifier; the draws and coins of the ratio
rules must be independent of it and of each other, or the output is biased.

U = (bits + 1/2) / 2^32 with the top 32 bits of a draw, so 2^-33 <= U <= 1 - 2^-33, never 0 or 1. Gumbel noise
-log(-log U) lies in [GUMBEL_LOW, GUMBEL_HIGH] = [-log(33 log 2), -log(-log(1 - 2^-33))] = [-3.1300, 22.8739]. A token
less likely than about 2^-32 is drawn too rarely; with the customary 24 bits that happened below 2^-24, which a
vocabulary of 128,000 tokens reaches.

`slipstream.engine.sampler.torch_noise` computes the same bits with torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

BITS = 32
GUMBEL_LOW = -math.log((BITS + 1) * math.log(2.0))
GUMBEL_HIGH = -math.log(-math.log1p(-(2.0 ** -(BITS + 1))))

GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
PURPOSES = 8  # room for purposes below one position; changing it changes every text

TokenIds = Sequence[int] | npt.NDArray[np.integer]


class Purpose(IntEnum):
    """The purpose of a draw. The numbers are part of the contract: they fix the text."""

    COUPLED = 0
    """Gumbel noise shared by drafter and verifier."""
    DRAFT = 1
    """A drafter's own draws under the ratio rule."""
    ACCEPT = 2
    """The coin that accepts or rejects a draft token."""
    RESIDUAL = 3
    """The recovered token after a rejection."""
    BONUS = 4
    """The token after full acceptance."""


def mix(state: int) -> int:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit moves every output bit."""
    state = ((state ^ (state >> 30)) * FIRST) & _MASK
    state = ((state ^ (state >> 27)) * SECOND) & _MASK
    return state ^ (state >> 31)


def key(seed: int, position: int, purpose: Purpose) -> int:
    """The 64-bit name of a stream. Distinct (position, purpose) of one seed never share a key: each step is a
    bijection.
    """
    return mix((mix(seed & _MASK) + (position * PURPOSES + purpose + 1) * GOLDEN) & _MASK)


def keys(
    seeds: Sequence[int] | npt.NDArray[np.uint64], positions: Sequence[int] | npt.NDArray[np.int64], purpose: Purpose
) -> npt.NDArray[np.uint64]:
    """`key` for many rows at once: [R] seeds (64 unsigned bits) and [R] positions -> [R]."""
    counters = np.asarray(positions, dtype=np.uint64) * np.uint64(PURPOSES) + np.uint64(purpose + 1)
    return mix_all(mix_all(np.array(seeds, dtype=np.uint64)) + counters * np.uint64(GOLDEN))


def bits(key: int, token_ids: TokenIds) -> npt.NDArray[np.uint32]:
    """The draws of these tokens, each 32 uniform bits; same shape as `token_ids`."""
    counters = np.asarray(token_ids).astype(np.uint64) + np.uint64(1)
    draws = np.asarray(np.uint64(key & _MASK) + counters * np.uint64(GOLDEN))
    mix_in_place(draws)
    return (draws >> np.uint64(64 - BITS)).astype(np.uint32)


def uniform(key: int, token_ids: TokenIds) -> npt.NDArray[np.float64]:
    """U of these tokens, strictly inside (0, 1)."""
    return (bits(key, token_ids).astype(np.float64) + 0.5) * 2.0**-BITS


def gumbel(key: int, token_ids: TokenIds) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise -log(-log U) of these tokens."""
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform(key, token_ids)))
    return noise


def scalar_bits(key: int, token_id: int) -> int:
    """Reference of `bits` in plain integers."""
    return mix((key + (token_id + 1) * GOLDEN) & _MASK) >> (64 - BITS)


def scalar_uniform(key: int, token_id: int = 0) -> float:
    """Reference of `uniform`; also the coin of a rule that needs one number at each position."""
    return (scalar_bits(key, token_id) + 0.5) * 2.0**-BITS


def mix_all(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix` of each number of an array; same shape."""
    state = state.copy()
    mix_in_place(state)
    return state


def mix_in_place(state: npt.NDArray[np.uint64]) -> None:
    """`mix` of a large array with one array of scratch; allocating afresh for each step costs more than the
    arithmetic.
    """
    scratch = np.right_shift(state, np.uint64(30))
    state ^= scratch
    state *= np.uint64(FIRST)
    np.right_shift(state, np.uint64(27), out=scratch)
    state ^= scratch
    state *= np.uint64(SECOND)
    np.right_shift(state, np.uint64(31), out=scratch)
    state ^= scratch
