"""Exact logits processing, batched over rows of many sessions and tree nodes.

Order: the grammar's mask, penalties, bias and allowed tokens, temperature, top-k, top-p, min-p. So all cuts count
allowed tokens only, and no bias brings a forbidden one back. The result is log p up to a constant per row, with -inf
for tokens that are cut.
Ties: top-k and top-p count tokens from the most likely down, equal ones from the lowest id up, and keep exactly as many
as they must (the transformers processors keep every token that ties with the k-th, and leave the order of equal tokens
under top-p to the sort). top-p keeps the smallest such set whose mass reaches top_p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.engine.devices import upload
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.speculation.sampling_params import SamplingParams, TokenLogprobs
from slipstream.tokenizer.grammar import Mask

_SHORTLIST = 256
"""A nucleus is first looked for among this many likely tokens; sorting a whole vocabulary is rarely needed."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The sampling parameters and the text before one row of logits."""

    sampling: SamplingParams
    history: TokenHistory | None = None
    """The committed tokens; needed only where `sampling.penalised`."""
    path: tuple[int, ...] = ()
    """The tokens between the history and this row (a tree node's path)."""
    mask: Mask | None = None
    """The tokens that a grammar allows here."""


def process(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """float32 [R, V] and R rows -> float32 [R, V]; the input is left alone and may be returned.

    Greedy rows get mask, penalties and bias only: the rest cannot move an argmax whose ties go to the lowest id. A row
    with NaN or without a finite logit is passed through; `coupled_sampling.choose` reports it.
    """
    samplings = [row.sampling for row in rows]
    if all(each.greedy for each in samplings):
        return adjust(logits, rows)
    temperatures = np.array([1.0 if each.greedy else each.temperature for each in samplings], np.float32)
    cuts = np.array([cuts_of(each) for each in samplings], CUTS)
    return sharpen(adjust(logits, rows), temperatures, cuts)


def adjust(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Masks, penalties and bias, as `process` applies them before all else."""
    return _adjust(_allow(logits, rows), rows)


CUTS = np.dtype([("top_k", np.int64), ("top_p", np.float64), ("floor", np.float32)])
"""The cuts of a row, by what keeps all tokens: `top_k` 0, `top_p` 1, and `floor`, log min_p, -inf. One more field here
is a column of vLLM's workers too."""
NO_CUTS = np.array((0, 1.0, -math.inf), CUTS)
Cuts = npt.NDArray[np.void]
"""[R] of CUTS."""


def cuts_of(sampling: SamplingParams) -> tuple[int, float, float]:
    """One of CUTS; of greedy decoding, which they cannot change, NO_CUTS."""
    if sampling.greedy:
        return 0, 1.0, -math.inf
    return sampling.top_k, sampling.top_p, math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf


def sharpen(logits: Tensor, temperatures: npt.NDArray[np.float32], cuts: Cuts) -> Tensor:
    """Temperature and cuts: float32 [R, V] and parameters [R] -> float32 [R, V]; the input is left alone and may be
    returned."""
    output = logits
    if (temperatures != 1.0).any():
        output = _scale(output, upload(torch.from_numpy(temperatures), logits.device))
    rows = np.flatnonzero(cuts != NO_CUTS)
    if not len(rows):
        return output
    if len(rows) == len(cuts):
        return _truncate(output, cuts)
    output = output.clone() if output is logits else output
    index = upload(torch.from_numpy(rows), logits.device)
    output[index] = _truncate(output[index], cuts[rows])
    return output


def _scale(logits: Tensor, divisors: Tensor) -> Tensor:
    """Divides each row; where a tiny temperature would overflow, the row's maximum is taken off first."""
    maxima = logits.amax(dim=-1)
    overflow = ~(maxima / divisors).isfinite() & maxima.isfinite()
    if not logits.is_cpu or bool(overflow.any()):  # only a CPU knows without a wait
        logits = torch.where(overflow[:, None], logits - maxima[:, None], logits)
    return logits / divisors[:, None]


def _allow(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """-inf for what a grammar forbids, on the rows that have one."""
    constrained = [(index, row.mask) for index, row in enumerate(rows) if row.mask is not None]
    if not constrained:
        return logits
    indices, masks = zip(*constrained, strict=True)
    return forbid(logits, np.array(indices), np.stack(masks))


def forbid(logits: Tensor, rows: npt.NDArray[np.int64], masks: npt.NDArray[np.uint8]) -> Tensor:
    """A copy of the logits with -inf for the tokens whose bits are 0 in the masks of these rows."""
    index = upload(torch.from_numpy(rows), logits.device)
    output = logits.clone()
    # Added, not filled in: NaN stays NaN, so that broken numbers are found.
    output[index] += torch.where(_unpack(masks, logits.shape[-1], logits.device), 0.0, -math.inf)
    return output


def _unpack(masks: npt.NDArray[np.uint8], vocabulary: int, device: torch.device) -> Tensor:
    """bool [M, V]; only the bits go to the device."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(masks, axis=-1, count=vocabulary, bitorder="little").view(np.bool_))
    bits = upload(torch.from_numpy(masks), device)[:, :, None]
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (bits >> places).bitwise_and_(1).flatten(1)[:, :vocabulary].bool()


def _adjust(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Penalties and bias, on the rows that have any."""
    touched = [index for index, row in enumerate(rows) if row.sampling.adjusted]
    if not touched:
        return logits
    output = logits.clone()
    for index in touched:
        row = rows[index]
        if row.sampling.penalised:
            _penalise(output[index], row)
        if row.sampling.biased:
            add_bias(output[index], row.sampling)
    return output


def add_bias(logits: Tensor, sampling: SamplingParams) -> None:
    """In place on one row [V]: what the parameters add to single tokens, whatever the text is. What is not allowed gets
    -inf, added as in `forbid`."""
    if sampling.allowed_token_ids:
        barred = torch.full_like(logits, -math.inf)
        barred[upload(torch.tensor(sampling.allowed_token_ids), logits.device)] = 0.0
        logits += barred
    ids = upload(torch.tensor(list(sampling.logit_bias), dtype=torch.int64), logits.device)
    logits[ids] += upload(torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32), logits.device)


def _penalise(logits: Tensor, row: SampledRow) -> None:
    """In place on one row [V]. Repetition: Keskar et al. 2019 (CTRL), section 4.1; presence and frequency: output
    tokens only.
    """
    sampling, history = row.sampling, row.history or TokenHistory(())
    ids, counts, seen = (upload(torch.from_numpy(array), logits.device) for array in history.tally(row.path))
    values = logits[ids]
    if sampling.repetition_penalty != 1.0:
        factor = sampling.repetition_penalty
        values = torch.where(seen, torch.where(values > 0.0, values / factor, values * factor), values)
    if sampling.presence_penalty != 0.0:
        values = values - sampling.presence_penalty * (counts > 0.0)
    if sampling.frequency_penalty != 0.0:
        values = values - sampling.frequency_penalty * counts
    logits[ids] = values


def _truncate(logits: Tensor, cuts: Cuts) -> Tensor:
    """top-k, top-p and min-p of every row."""
    vocabulary = logits.shape[-1]
    top_k, top_p, floor = (cuts[name].copy() for name in ("top_k", "top_p", "floor"))  # torch wants them packed
    if (((top_k > 0) & (top_k < vocabulary)) | (top_p < 1.0)).any():
        logits = _truncate_by_rank(logits, top_k, top_p)
    if (floor > -math.inf).any():
        threshold = logits.amax(dim=-1) + upload(torch.from_numpy(floor), logits.device)
        logits = logits.masked_fill(logits < threshold[:, None], -math.inf)
    return logits


def _truncate_by_rank(logits: Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]) -> Tensor:
    """top-k and top-p both keep a row's most likely n tokens; only n is found differently."""
    vocabulary, device = logits.shape[-1], logits.device
    ranked = (top_k > 0) & (top_k < vocabulary)
    tops = upload(torch.from_numpy(np.where(ranked, top_k, vocabulary)), device)
    masses = upload(torch.from_numpy(top_p), device)
    needed = max(_SHORTLIST, int(np.where(ranked, top_k, 0).max()))
    width = min(vocabulary, needed)
    if not logits.is_cpu:  # whether so many suffice would have to be known on the host
        by_mass = (top_p < 1.0) & ~(ranked & (top_k <= width))
        values = logits.sort(dim=-1, descending=True).values if by_mass.any() else logits.topk(width, dim=-1).values
        return _keep(logits, values, _nucleus(values, logits, tops, masses))
    values = logits.topk(width, dim=-1).values
    counts = _nucleus(values, logits, tops, masses)
    output = _keep(logits, values, counts)
    wide = ((counts > width) & (masses < 1.0)).nonzero().flatten()
    if width < vocabulary and len(wide):
        rows = logits[wide]
        values = rows.sort(dim=-1, descending=True).values
        output[wide] = _keep(rows, values, _nucleus(values, rows, tops[wide], masses[wide]))
    return output


def _nucleus(values: Tensor, logits: Tensor, tops: Tensor, masses: Tensor) -> Tensor:
    """Number of tokens [R] that survive top-k and top-p; above values' width: the width did not suffice.

    values [R, W]: the largest logits, descending. A token stays if the mass before it has not reached top_p; the mass
    is that of the tokens which top-k left.
    """
    width, vocabulary = values.shape[-1], logits.shape[-1]
    weights = (values - values[:, :1]).double().exp_()
    inside = torch.arange(width, device=values.device)[None, :] < tops[:, None]
    weights = weights.masked_fill(~inside, 0.0)
    total = _row_sums(weights)
    if width < vocabulary and logits.is_cpu and bool((tops > width).any()):
        whole = _row_sums((logits - values[:, :1]).exp_())
        total = torch.where(tops > width, whole, total)
    before = weights.cumsum(dim=-1) - weights
    kept = ((before < (masses * total)[:, None]) & inside).sum(dim=-1).clamp_(min=1)
    kept = torch.where(masses < 1.0, kept, torch.minimum(tops, torch.full_like(tops, vocabulary)))
    unfinished = (masses < 1.0) & (kept == width) & (tops > width)
    return torch.where(unfinished, width + 1, kept)


def _keep(logits: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    """Cuts all but the `counts` most likely tokens of each row, of equal ones the highest ids first.

    values [R, W]: the largest logits, descending; a count beyond W keeps the whole row.
    """
    whole = counts > values.shape[-1]
    last = values.gather(-1, (counts - 1).clamp_(max=values.shape[-1] - 1)[:, None])
    last = last.masked_fill(whole[:, None], -math.inf)
    kept = ~(logits < last)
    spare = torch.where(whole, 0, kept.sum(dim=-1) - counts)
    if not logits.is_cpu:  # where there are ties would have to be known on the host
        equal = logits == last
        room = equal.sum(dim=-1) - spare
        kept &= ~(equal & (equal.cumsum(dim=-1) > room[:, None]))
        return logits.masked_fill(~kept, -math.inf)
    tied = spare.nonzero().flatten()
    if len(tied):
        equal = logits[tied] == last[tied]
        room = equal.sum(dim=-1) - spare[tied]
        kept[tied] &= ~(equal & (equal.cumsum(dim=-1) > room[:, None]))
    return logits.masked_fill(~kept, -math.inf)


class LogprobArrays(NamedTuple):
    """`TokenLogprobs` of T tokens."""

    chosen: npt.NDArray[np.float32]
    """[T] of the tokens themselves."""
    tops: npt.NDArray[np.int64]
    """[T] likeliest tokens of each row, whose ids and values follow one another in the next two."""
    token_ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]

    def tokens(self) -> list[TokenLogprobs]:
        pairs = zip(self.token_ids.tolist(), self.values.tolist(), strict=True)
        likeliest = (tuple(islice(pairs, count)) for count in self.tops.tolist())
        return [TokenLogprobs(*each) for each in zip(self.chosen.tolist(), likeliest, strict=True)]


def logprobs(logits: Tensor, tokens: Tensor, tops: npt.NDArray[np.int64]) -> LogprobArrays:
    """Raw logits [T, V], the token int64 [T] chosen in each row, and how many of the likeliest each row wants [T].

    On a CPU a row's numbers do not depend on the other rows. Looks at all tokens that reach the last one's value, for
    `topk` does not define which of equal ones it takes.
    """
    logits = logits.float()
    shares = logits - _normaliser(logits)
    chosen = shares.gather(-1, tokens[:, None]).flatten().cpu().numpy()
    width = min(int(tops.max(initial=0)), shares.shape[-1])
    if not width:
        return LogprobArrays(chosen, np.zeros(len(chosen), np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
    last = shares.topk(width, dim=-1).values[:, -1:]
    where = (shares >= last).nonzero(as_tuple=True)
    rows, ids, values = (each.cpu().numpy() for each in (*where, shares[where]))
    order = np.lexsort((ids, -values, rows))
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)  # the rows are ascending
    best = order[rank < tops[rows]]
    return LogprobArrays(chosen, np.bincount(rows[best], minlength=len(chosen)), ids[best], values[best])


def _normaliser(logits: Tensor) -> Tensor:
    """float32 [T, V] -> [T, 1], the logarithm of the sum of the exponentials of each row."""
    top = logits.amax(dim=-1, keepdim=True)
    return top + _row_sums((logits - top).exp_()).log().float()[:, None]


def _row_sums(weights: Tensor) -> Tensor:
    """Floats [R, N] -> float64 [R]; on a CPU the sum of a row does not depend on the other rows.

    torch gives one row's parts to several threads and several rows to one thread each, which adds in another order, so
    what a sum decides would depend on the number of candidates in the pass. numpy adds each row alone, on one thread.
    """
    if not weights.is_cpu:
        return weights.sum(dim=-1, dtype=torch.float64)
    return torch.from_numpy(weights.detach().double().numpy().sum(axis=-1))
