"""The ranking of a draft model's tokens as kernels. What they compute, and when it is what torch's operators compute,
says `slipstream.engine.sampler.fused_ranking`, which launches them after `survey` and `prepare` of
`slipstream.engine.kernels.fused_sampling`, whose names for sizes and settings hold here too.

`gather` looks at all logits: it adds up weights and gathers the tokens that may be among a row's TOP_K likeliest, at
most SHORT. `shortlist` keeps exactly those; `finish` cuts, scores and ranks them.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,misc"

from __future__ import annotations

import triton.language as tl

from slipstream.engine.kernels.fused_sampling import (
    BOUND,
    COLUMNS,
    COUNT,
    DEPTH,
    FLOOR,
    GREEDY,
    KEY,
    LOWEST,
    NO_TOKEN,
    OFFSET,
    PEAK,
    SCALE,
    TEMPERATURE,
    TIES,
    TOP_K,
    TOP_P,
    UNIT,
    _adjusted,
    _bits,
    _gather,
    _ids,
    _key,
    _largest,
    _some,
    _tally,
    _value,
    _weight,
)
from slipstream.engine.kernels.triton_launch import jit

WHOLE = DEPTH
"""Index of a setting: 1 where a share is one of all tokens, not of the shortlist. There are no candidates to count."""


@jit
def gather(
    read, maxima, row_broken, row_floats, found, values, tokens, sums, sharpness, size, stride, parts,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Grid (R, parts). A block's tokens that may be among the likeliest, in any order, as far as there is room, and for
    rows of which a share is one of all tokens how much the block weighs."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = read[1] + row * COLUMNS
    if tl.load(row_broken + row) == 0:
        offset = tl.load(row_floats + row * 3 + OFFSET)
        peak = tl.load(row_floats + row * 3 + PEAK)
        bound = tl.load(row_floats + row * 3 + BOUND)
        temperature = tl.load(read[2] + row * COLUMNS + TEMPERATURE).to(tl.float32)
        whole = tl.load(own + WHOLE) != 0
        tops = tl.load(maxima + (row * parts + part) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP))
        top = tl.div_rn(tl.reduce(tops, 0, tl.standard._elementwise_max) - offset, temperature)
        if (top >= bound) | whole:
            at = part * BLOCK + tl.arange(0, BLOCK)
            x = tl.div_rn(_adjusted(read, row, at, size, stride) - offset, temperature)
            if whole:
                shares = x - peak
                if tl.load(own + GREEDY) != 0:
                    shares = shares * sharpness
                tl.store(sums + row * parts + part, tl.reduce(_weight(shares), 0, tl.standard._sum_combine))
            _gather(x, at, bound, row, found, values, tokens, CAPACITY)


@jit
def shortlist(
    read, row_broken, row_floats, found, values, tokens, listed, listed_ids, lengths, size, stride,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, WAYS: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Grid (R,). A row's TOP_K likeliest tokens in any order, of equal ones the lowest ids, and how many they are; none
    of a broken row."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.full((), 0, tl.int32)
    if tl.load(row_broken + row) == 0:
        top_k = tl.load(read[1] + row * COLUMNS + TOP_K)
        offset = tl.load(row_floats + row * 3 + OFFSET)
        peak = tl.load(row_floats + row * 3 + PEAK)
        temperature = tl.load(read[2] + row * COLUMNS + TEMPERATURE).to(tl.float32)
        gathered = (values, tokens, CAPACITY)
        count = tl.load(found + row)
        rows = tl.where(count <= CAPACITY, count, size)
        low = tl.maximum(_key(tl.load(row_floats + row * 3 + BOUND)).to(tl.int64), LOWEST)
        newest = tl.full((), 0, tl.int64) + size
        if count > top_k:
            low = _largest(
                read, gathered, row, rows, count, offset, temperature, peak, size, stride, low,
                _key(peak).to(tl.int64), top_k.to(tl.float64), 0.0, COUNT, CHUNK, WAYS,
            )  # fmt: skip
            limit = _value(low.to(tl.int32))
            above, _, ties = _tally(
                read, gathered, row, rows, count, offset, temperature, peak, size, stride, limit, CHUNK
            )
            if top_k - above < ties:
                newest = 0 - _largest(
                    read, gathered, row, rows, count, offset, temperature, peak, size, stride, 1 - newest, newest * 0,
                    (top_k - above).to(tl.float64), limit, TIES, CHUNK, WAYS,
                )  # fmt: skip
        limit = _value(low.to(tl.int32))
        for start in range(0, rows, CHUNK):
            at = start + tl.arange(0, CHUNK)
            x = _some(read, gathered, row, at, count, offset, temperature, size, stride)
            ids = _ids(gathered, row, at, count, x >= limit)
            stays = ((x > limit) | ((x == limit) & (ids <= newest))).to(tl.int32)
            slot = length + tl.associative_scan(stays, 0, tl.standard._sum_combine) - 1
            fits = (stays != 0) & (slot < SHORT)
            tl.store(listed + row * SHORT + slot, x, mask=fits)
            tl.store(listed_ids + row * SHORT + slot, ids, mask=fits)
            length += tl.reduce(stays, 0, tl.standard._sum_combine)
    tl.store(lengths + row, length)


@jit
def finish(
    settings, floats, row_floats, sums, listed, listed_ids, lengths, best_tokens, confidences, sharpness, parts, count,
    PARTS: tl.constexpr, SHORT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid (R,). top-p and min-p of a shortlist, then its `count` best scores, best first: whose they are, and their
    confidences; -1 and -inf where there are no more."""
    row = tl.program_id(0).to(tl.int64)
    own, of_row = settings + row * COLUMNS, floats + row * COLUMNS
    greedy, top_p = tl.load(own + GREEDY), tl.load(of_row + TOP_P)
    length, peak = tl.load(lengths + row), tl.load(row_floats + row * 3 + PEAK)
    at, blocks = tl.arange(0, SHORT), tl.arange(0, PARTS)
    x = tl.load(listed + row * SHORT + at, mask=at < length, other=float("-inf"))
    ids = tl.load(listed_ids + row * SHORT + at, mask=at < length, other=NO_TOKEN)
    shifted = tl.where(at < length, x - peak, float("-inf"))
    block_sums = tl.load(sums + row * parts + blocks, mask=blocks < parts, other=0)
    total = tl.reduce(block_sums, 0, tl.standard._sum_combine)
    if tl.load(own + WHOLE) == 0:
        total = tl.reduce(_weight(shifted), 0, tl.standard._sum_combine)
    stays = (at < length) & (x >= peak + tl.load(of_row + FLOOR).to(tl.float32))
    if top_p < 1.0:
        before = tl.full((SHORT,), 0, tl.int64)
        for start in range(0, SHORT, PAIRS):
            here = start + tl.arange(0, PAIRS)
            other = tl.load(listed + row * SHORT + here, mask=here < length, other=float("-inf"))
            other_ids = tl.load(listed_ids + row * SHORT + here, mask=here < length, other=NO_TOKEN)
            weights = _weight(tl.where(here < length, other - peak, float("-inf")))
            ties = (other[None, :] == x[:, None]) & (other_ids[None, :] < ids[:, None])
            ahead = (other[None, :] > x[:, None]) | ties
            before += tl.reduce(tl.where(ahead, weights[None, :], 0), 1, tl.standard._sum_combine)
        stays = stays & ((before.to(tl.float64) < top_p * total.to(tl.float64)) | (before == 0))
    scores = shifted.to(tl.float64)
    if greedy == 0:
        u = (_bits(tl.load(own + KEY).to(tl.uint64, bitcast=True), ids).to(tl.float64) + 0.5) * SCALE
        scores = scores - tl.log(-tl.log(u))
    scores = tl.where(stays, scores, float("-inf"))
    sharp = tl.full((), 0.0, tl.float64) + sharpness
    top = tl.reduce(scores, 0, tl.standard._elementwise_max) * sharp
    lasting = tl.reduce(tl.exp(scores * sharp - top), 0, tl.standard._sum_combine)
    normaliser = top + tl.log(tl.where(greedy != 0, total.to(tl.float64) / UNIT, lasting))
    normaliser = tl.where(greedy != 0, normaliser - top, normaliser)
    for place in range(0, count):
        best = tl.reduce(scores, 0, tl.standard._elementwise_max)
        winner = tl.reduce(tl.where(scores == best, ids, NO_TOKEN), 0, tl.standard._elementwise_min)
        sure = tl.minimum((best * sharp - normaliser).to(tl.float32), 0.0)
        possible = (best > float("-inf")) & (sure > float("-inf"))
        tl.store(best_tokens + row * count + place, tl.where(possible, winner, -1).to(tl.int64))
        tl.store(confidences + row * count + place, tl.where(possible, sure, float("-inf")))
        scores = tl.where(ids == winner, float("-inf"), scores)
