"""Gumbel-max choices with noise that belongs to the position: y = argmax over v of log p(v) + g(seed, position, v).

Computed as an exponential race, argmin of E_v / p_v with E = -log U. Since E >= 1 - U, the cheap race (1 - U_v) / p_v
is never behind the true one; its winner's true time, then, is a bar that few others pass, and only those need
logarithms. The result is exactly that of scoring every token in float64. The score is (logit - row maximum) + g; ties
go to the lowest id.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.engine.devices import upload
from slipstream.engine.kernels.race import contenders
from slipstream.engine.kernels.ranking import rank_likeliest, ranks
from slipstream.engine.sampler import torch_noise
from slipstream.speculation import noise as scalar
from slipstream.speculation.noise import Purpose

_REACH = scalar.GUMBEL_HIGH - scalar.GUMBEL_LOW + 0.01
"""A token this far below the most likely one loses whatever the noise (float32 rounding included)."""
_SLACK = 1.001
"""Covers the float32 rounding of the cheap race."""
_SPARSE = 0.25
"""Below this fraction of tokens within reach, gathering them first is cheaper than hashing all."""
_STRIDE = 31
"""The fraction is estimated from every 31st token; a bad estimate costs time, never exactness."""
_BLOCK = 1 << 15
"""Draws per block: their int64 scratch stays in the cache."""
_SCALE = 2.0**scalar.BITS
_ONES = (1 << scalar.BITS) - 1
_SHORTLIST = 256
_LEVEL = 0.3
"""From this fraction of tokens on that tie for the last place, NumPy's selection is the slower one; looked at as above.
"""


def choose(
    logits: Tensor,
    greedy: Sequence[bool] | npt.NDArray[np.bool_],
    seeds: Sequence[int] | npt.NDArray[np.uint64],
    positions: Sequence[int] | npt.NDArray[np.int64],
) -> tuple[Tensor, Tensor]:
    """Processed logits float32 [R, V] -> (tokens int64 [R], broken bool [R]).

    Greedy rows take the argmax. A row with NaN, +inf or no finite logit is broken, and its token is -1.
    """
    maxima, tokens = logits.max(dim=-1)
    broken = ~maxima.isfinite()
    sampled = np.flatnonzero(~np.asarray(greedy, np.bool_))
    if len(sampled):
        own = np.asarray(seeds, np.uint64)[sampled], np.asarray(positions, np.int64)[sampled]
        keys = upload(torch_noise.keys(*own, Purpose.COUPLED), logits.device)
        if len(sampled) == len(logits):
            tokens = _race(logits, maxima, keys)
        else:
            index = upload(torch.from_numpy(sampled), logits.device)
            tokens[index] = _race(logits[index], maxima[index], keys)
    return tokens.masked_fill_(broken, -1), broken


def likeliest(logits: Tensor) -> list[int]:
    """float32 [R, V] -> the argmax of each row, ties to the lowest id; -1 for rows with NaN, +inf or nothing finite."""
    if not logits.is_cpu:
        maxima, best = logits.max(dim=-1)
        return list(best.masked_fill_(~maxima.isfinite(), -1).tolist())
    array = logits.float().numpy()  # whose argmax is many times faster than torch's on a CPU
    chosen = array.argmax(axis=-1)
    finite = np.isfinite(array[np.arange(len(array)), chosen])
    return list(np.where(finite, chosen, -1).tolist())


def rank(
    logits: Tensor,
    greedy: Sequence[bool],
    seeds: Sequence[int],
    positions: Sequence[int],
    count: int,
    sharpness: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """A drafter's best `count` guesses at the target's choice: (tokens int64 [R, count], confidences float32 [R,
    count]).

    Best first by log q + g (greedy: by log q), among the 256 most likely tokens. The confidence is a log-softmax of
    `sharpness` times the scores that rank them: for a greedy row over the vocabulary, for a sampled one over the
    perturbed scores, since the noise is known. Two models agree on the best token more often than either gives it.
    Where fewer tokens than `count` are possible, and in broken rows, the token is -1 and the confidence -inf; a token
    is possible if its confidence is above -inf in float32.
    """
    if any(greedy) and ranks(logits, count):
        return _rank_apart(logits, greedy, seeds, positions, count, sharpness)
    noisy = not all(greedy)  # without noise the likeliest are the best
    width = min(logits.shape[-1], max(_SHORTLIST, count) if noisy else count)
    values, ids = _shortlist(logits, width)
    top = values.amax(dim=-1, keepdim=True)
    pure = upload(torch.tensor(greedy, dtype=torch.bool), logits.device)[:, None]
    scores = (values - top).double()
    if noisy:
        keys = upload(torch_noise.keys(seeds, positions, Purpose.COUPLED), logits.device)
        scores += torch_noise.gumbel(keys[:, None], ids).masked_fill(pure, 0.0)
    best, order = scores.topk(min(count, width), dim=-1)
    normaliser = (scores * sharpness).logsumexp(dim=-1, keepdim=True)
    if any(greedy):
        whole = ((logits - top) * sharpness).logsumexp(dim=-1, keepdim=True)
        normaliser = torch.where(pure, whole.double(), normaliser)
    confidences = (best * sharpness - normaliser).float().clamp_(max=0.0)
    impossible = ~top.isfinite() | confidences.isneginf() | confidences.isnan()
    return ids.gather(-1, order).masked_fill_(impossible, -1), confidences.masked_fill_(impossible, -math.inf)


def _rank_apart(
    logits: Tensor,
    greedy: Sequence[bool],
    seeds: Sequence[int],
    positions: Sequence[int],
    count: int,
    sharpness: float,
) -> tuple[Tensor, Tensor]:
    """`rank` with a kernel for greedy rows, of which there are some."""
    if all(greedy):
        return rank_likeliest(logits, count, sharpness)
    tokens, confidences = logits.new_empty(len(logits), count, dtype=torch.int64), logits.new_empty(len(logits), count)
    pure, noisy = ([row for row, each in enumerate(greedy) if each == kind] for kind in (True, False))
    tokens[pure], confidences[pure] = rank_likeliest(logits[pure], count, sharpness)
    own = [False] * len(noisy), [seeds[row] for row in noisy], [positions[row] for row in noisy]
    tokens[noisy], confidences[noisy] = rank(logits[noisy], *own, count, sharpness)
    return tokens, confidences


def _shortlist(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest logits of each row and their token ids, in any order."""
    if not logits.is_cpu or width == logits.shape[-1] or _is_level(logits):
        return logits.topk(width, dim=-1)
    # torch's takes five times as long from a dozen rows on.
    ids = torch.from_numpy(np.argpartition(logits.numpy(), -width, axis=-1)[:, -width:])
    return logits.gather(-1, ids), ids


def _is_level(logits: Tensor) -> bool:
    """True if many tokens are equally unlikely, as after a cut or under a grammar: NumPy's selection halves no row of
    equals, and takes 10 to 30 times as long then."""
    sample = logits[:, ::_STRIDE]
    ties = sample == sample.amin(dim=-1, keepdim=True)
    return int(ties.count_nonzero()) > _LEVEL * ties.numel()


def _race(logits: Tensor, maxima: Tensor, keys: Tensor) -> Tensor:
    """[R, V], [R], keys [R] -> winners [R]; anything for broken rows.

    On a GPU every token is scored: how many may win would have to be known on the host.
    """
    shifted = logits - maxima[:, None]
    if not shifted.is_cpu:
        token_ids = torch.arange(logits.shape[-1], device=logits.device)
        return torch_noise.gumbel(keys[:, None], token_ids).add_(shifted).argmax(dim=-1)
    by_kernel = contenders(shifted, keys)
    if by_kernel is not None and by_kernel[0].tolist() == list(range(len(keys))):  # each is the only one of its row
        return by_kernel[1]
    row, token = by_kernel or (_contenders_among_few if _is_sparse(shifted) else _contenders)(shifted, keys)
    scores = shifted[row, token].double() + torch_noise.gumbel(keys[row], token)
    best = torch.full_like(maxima, -math.inf, dtype=torch.float64).scatter_reduce_(0, row, scores, "amax")
    first = scores == best[row]
    winners = torch.full_like(keys, logits.shape[-1])
    return winners.scatter_reduce_(0, row[first], token[first], "amin")


def _is_sparse(shifted: Tensor) -> bool:
    """True if few tokens are within reach."""
    sample = shifted[:, ::_STRIDE] >= -_REACH
    return int(sample.count_nonzero()) < _SPARSE * sample.numel()


def _contenders(shifted: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and tokens that their cheap time (1 - U) / p, with p relative to the most likely token, does not rule
    out.
    """
    rows, vocabulary = shifted.shape
    token_ids = torch.arange(vocabulary)
    times = shifted.exp()
    width, height = min(vocabulary, _BLOCK), max(1, _BLOCK // vocabulary)
    for top, left in itertools.product(range(0, rows, height), range(0, vocabulary, width)):
        block = times[top : top + height, left : left + width]
        draws = torch_noise.bits(keys[top : top + height, None], token_ids[left : left + width])
        torch.div(_missing(draws), block, out=block)
    return _where(times <= _bar(times.amin(dim=-1))[:, None])


def _contenders_among_few(shifted: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """`_contenders` for rows with most tokens out of reach, as after top-k or top-p: only the others are hashed."""
    row, token = _where(shifted >= -_REACH)
    times = _missing(torch_noise.bits(keys[row], token)).div_(shifted[row, token].exp())
    leading = torch.full_like(keys, math.inf, dtype=torch.float32).scatter_reduce_(0, row, times, "amin")
    left = times <= _bar(leading)[row]
    return row[left], token[left]


def _where(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the true entries; NumPy is many times faster at it than torch."""
    flat = torch.from_numpy(np.flatnonzero(mask.numpy()))
    return flat // mask.shape[-1], flat % mask.shape[-1]


def _missing(bits: Tensor) -> Tensor:
    """1 - U in float32, in units of 2^-32; overwrites the bits. The half keeps it above zero."""
    return bits.bitwise_xor_(_ONES).float().add_(0.5)


def _bar(leading: Tensor) -> Tensor:
    """A bound on the true time of the cheap race's winner, from its cheap time alone [R]; both in units of 2^-32.

    True time / cheap time = -log(1 - c) / c with c = 1 - U of the winner. It grows with c, and c is at most the cheap
    time and at most 1 - 2^-33.
    """
    missing = (leading.double() / _SCALE).clamp_(min=0.5 / _SCALE, max=1.0 - 0.5 / _SCALE)
    return (leading * (torch.log1p(-missing).neg_() / missing)).mul_(_SLACK).float()
