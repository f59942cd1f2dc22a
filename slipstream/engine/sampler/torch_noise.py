"""`slipstream.speculation.noise` with torch, bit for bit: int64 arithmetic wraps, and shifts are made logical by
masking."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.speculation import noise
from slipstream.speculation.noise import Purpose

_SCALE = 2.0**-noise.BITS


def _signed(value: int) -> int:
    """The two's complement reading of 64 unsigned bits."""
    return value - (1 << 64) if value >> 63 else value


_GOLDEN, _FIRST, _SECOND = _signed(noise.GOLDEN), _signed(noise.FIRST), _signed(noise.SECOND)


def keys(
    seeds: Sequence[int] | npt.NDArray[np.uint64], positions: Sequence[int] | npt.NDArray[np.int64], purpose: Purpose
) -> Tensor:
    """`noise.key` of every row: [R] and [R] -> int64 [R] on the CPU (the same bits, read as signed)."""
    return torch.from_numpy(noise.keys(seeds, positions, purpose).view(np.int64))


def mixed(seeds: Sequence[int] | npt.NDArray[np.uint64]) -> Tensor:
    """Seeds as `keys_at` takes them: [R] -> int64 [R] on the CPU."""
    return torch.from_numpy(noise.mix_all(np.asarray(seeds, np.uint64)).view(np.int64))


def keys_at(mixed_seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """`keys` on the device of the positions, which the host need not know: `mixed` seeds and int64 positions."""
    state = mixed_seeds + (positions * noise.PURPOSES + (purpose + 1)) * _GOLDEN
    return _mix(state)


def bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The draws of tokens: int64 keys and int64 token ids that broadcast together -> int64 in [0, 2^32)."""
    state = keys + (token_ids + 1) * _GOLDEN
    return _bits_by_numpy(state) if state.is_cpu else _bits_by_torch(state)


def _bits_by_numpy(state: Tensor) -> Tensor:
    """In place. NumPy shifts logically, so it needs two thirds of torch's passes over memory."""
    array = state.numpy().view(np.uint64)
    noise.mix_in_place(array)
    array >>= np.uint64(64 - noise.BITS)
    return state


def _bits_by_torch(state: Tensor) -> Tensor:
    """In place, on any device."""
    return _mix(state).bitwise_right_shift_(64 - noise.BITS).bitwise_and_((1 << noise.BITS) - 1)


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place."""
    _fold(state, 30).mul_(_FIRST)
    _fold(state, 27).mul_(_SECOND)
    return _fold(state, 31)


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """U of these tokens as float64, strictly inside (0, 1)."""
    return bits(keys, token_ids).double().add_(0.5).mul_(_SCALE)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of these tokens as float64."""
    return uniform(keys, token_ids).log_().neg_().log_().neg_()


def _fold(state: Tensor, shift: int) -> Tensor:
    """state ^= state >> shift, in place, with a logical shift."""
    return state.bitwise_xor_((state >> shift).bitwise_and_((1 << (64 - shift)) - 1))
