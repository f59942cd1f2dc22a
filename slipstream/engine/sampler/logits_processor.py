"""Exact logits processing, batched over rows of many sessions and tree nodes.

Order: the grammar's mask, penalties, bias, temperature, top-k, top-p, min-p. So all cuts count allowed tokens only, and
no bias brings a forbidden one back. The result is log p up to a constant per row, with -inf for tokens that are cut.
Ties: top-k and top-p count tokens from the most likely down, equal ones from the lowest id up, and keep exactly as many
as they must (the transformers processors keep every token that ties with the k-th, and leave the order of equal tokens
under top-p to the sort). top-p keeps the smallest such set whose mass reaches top_p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    output = _adjust(_allow(logits, rows), rows)
    temperatures = [1.0 if row.sampling.greedy else row.sampling.temperature for row in rows]
    if any(value != 1.0 for value in temperatures):
        divisors = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
        output = _scale(output, divisors)
    cut = [index for index, row in enumerate(rows) if _truncates(row.sampling)]
    if not cut:
        return output
    if len(cut) == len(rows):
        return _truncate(output, [row.sampling for row in rows])
    output = output.clone() if output is logits else output
    index = torch.tensor(cut, device=logits.device)
    output[index] = _truncate(output[index], [rows[i].sampling for i in cut])
    return output


def _truncates(sampling: SamplingParams) -> bool:
    return not sampling.greedy and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)


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
    bits = np.stack([mask for _, mask in constrained])
    forbidden = np.unpackbits(bits, axis=-1, count=logits.shape[-1], bitorder="little") == 0
    index = torch.tensor([index for index, _ in constrained], device=logits.device)
    output = logits.clone()
    # Added, not filled in: NaN stays NaN, so that broken numbers are found.
    output[index] += torch.where(torch.from_numpy(forbidden).to(logits.device), -math.inf, 0.0)
    return output


def _adjust(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Penalties and bias, on the rows that have any."""
    touched = [index for index, row in enumerate(rows) if row.sampling.penalised or row.sampling.logit_bias]
    if not touched:
        return logits
    output = logits.clone()
    for index in touched:
        row = rows[index]
        if row.sampling.penalised:
            _penalise(output[index], row)
        if row.sampling.logit_bias:
            ids = torch.tensor(list(row.sampling.logit_bias), device=output.device)
            bias = torch.tensor(list(row.sampling.logit_bias.values()), dtype=torch.float32, device=output.device)
            output[index, ids] += bias
    return output


def _penalise(logits: Tensor, row: SampledRow) -> None:
    """In place on one row [V]. Repetition: Keskar et al. 2019 (CTRL), section 4.1; presence and frequency: output
    tokens only.
    """
    sampling, history = row.sampling, row.history or TokenHistory(())
    ids, counts, seen = (torch.from_numpy(array).to(logits.device) for array in history.tally(row.path))
    values = logits[ids]
    if sampling.repetition_penalty != 1.0:
        factor = sampling.repetition_penalty
        values = torch.where(seen, torch.where(values > 0.0, values / factor, values * factor), values)
    if sampling.presence_penalty != 0.0:
        values = values - sampling.presence_penalty * (counts > 0.0)
    if sampling.frequency_penalty != 0.0:
        values = values - sampling.frequency_penalty * counts
    logits[ids] = values


def _truncate(logits: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """top-k, top-p and min-p of every row."""
    vocabulary = logits.shape[-1]
    if any(0 < s.top_k < vocabulary or s.top_p < 1.0 for s in samplings):
        logits = _truncate_by_rank(logits, samplings)
    if any(s.min_p > 0.0 for s in samplings):
        floors = [math.log(s.min_p) if s.min_p > 0.0 else -math.inf for s in samplings]
        floor = torch.tensor(floors, dtype=torch.float32, device=logits.device)
        threshold = logits.amax(dim=-1) + floor
        logits = logits.masked_fill(logits < threshold[:, None], -math.inf)
    return logits


def _truncate_by_rank(logits: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """top-k and top-p both keep a row's most likely n tokens; only n is found differently."""
    vocabulary, device = logits.shape[-1], logits.device
    tops = torch.tensor([s.top_k if 0 < s.top_k < vocabulary else vocabulary for s in samplings], device=device)
    masses = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)
    needed = max(_SHORTLIST, *(int(s.top_k) for s in samplings if s.top_k < vocabulary), 1)
    width = min(vocabulary, needed)
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
    total = weights.sum(dim=-1)
    if width < vocabulary and bool((tops > width).any()):
        whole = (logits - values[:, :1]).exp_().sum(dim=-1, dtype=torch.float64)
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
    tied = spare.nonzero().flatten()
    if len(tied):
        equal = logits[tied] == last[tied]
        room = equal.sum(dim=-1) - spare[tied]
        kept[tied] &= ~(equal & (equal.cumsum(dim=-1) > room[:, None]))
    return logits.masked_fill(~kept, -math.inf)


def logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Raw logits [R, V], the token chosen in each row, and how many of the likeliest each row wants."""
    logits = logits.float()
    shares = logits - logits.logsumexp(dim=-1, keepdim=True)
    chosen = shares.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]).flatten().tolist()
    best = _best(shares, tops)
    return [TokenLogprobs(logprob, top) for logprob, top in zip(chosen, best, strict=True)]


def _best(shares: Tensor, tops: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """Looks at all tokens that reach the last one's value: `topk` does not define which of equal ones it takes."""
    best: list[list[tuple[float, int]]] = [[] for _ in tops]
    width = min(max(tops), shares.shape[-1])
    if width:
        last = shares.topk(width, dim=-1).values[:, -1:]
        rows, ids = (shares >= last).nonzero(as_tuple=True)
        for row, token, share in zip(rows.tolist(), ids.tolist(), shares[rows, ids].tolist(), strict=True):
            best[row].append((-share, token))
    return [tuple((token, -cost) for cost, token in sorted(found)[:top]) for found, top in zip(best, tops, strict=True)]
