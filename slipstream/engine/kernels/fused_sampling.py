"""The coupled choice of a step's tokens as kernels: mask, penalties, bias, temperature, top-k, top-p, min-p, noise,
argmax, and acceptance along chains. What they compute, and when it is what torch's operators compute, says
`slipstream.engine.sampler.fused`, which launches them.

`survey` looks at all logits once, `prepare` makes of that what a row's blocks need to know, `race` looks at them again:
it decides rows without top-k and top-p, of others it gathers the tokens that may stay. `cut` decides those. `accept`
follows the chains, `count` counts what was decided. Rows are [R, V]; a block is BLOCK tokens of a row, a group GROUP of
them.

Reductions are written out, as the interpreter knows them; a kernel has as many cases as it has rows of different kinds.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,misc"

from __future__ import annotations

from functools import partial

import triton.language as tl

from slipstream.engine.kernels.triton_launch import jit
from slipstream.speculation import noise

COLUMNS = tl.constexpr(13)
"""Settings of a row, 8 bytes each: whole numbers, then float64."""
KEY, TOP_K, GREEDY, MASK, PLACE, FIRST, DEPTH = (tl.constexpr(at) for at in range(7))
TEMPERATURE, TOP_P, FLOOR, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(at) for at in range(7, 13))
OFFSET, PEAK, BOUND = (tl.constexpr(at) for at in range(3))
"""Indices of a row's three floats: the offset subtracted before the division, the largest logit after it, and a bound:
no token below it stays."""
COUNT, MASS, TIES = (tl.constexpr(at) for at in range(3))
"""Kinds of limits that `_largest` finds."""
NO_TOKEN = tl.constexpr((1 << 31) - 1)
"""Where no token is the best: above all ids, so that the lowest id wins."""
LOWEST = tl.constexpr(-(1 << 31) + (1 << 23))
"""Less than the key of any finite number."""
UNIT = tl.constexpr(float(1 << 44))
"""The weight of the likeliest token. Weights are whole numbers, so that their sum does not depend on the order: all
ranks of a group, and every pass, cut the same. 2^18 of them stay below 2^63."""
MARGIN = tl.constexpr(1e-3)
"""Scores in float32 are nearer than half of it to what they are."""
REACH = tl.constexpr(noise.GUMBEL_HIGH - noise.GUMBEL_LOW + 0.01)
GOLDEN, FIRST_FACTOR, SECOND_FACTOR = (tl.constexpr(each) for each in (noise.GOLDEN, noise.FIRST, noise.SECOND))
ONES = tl.constexpr((1 << noise.BITS) - 1)
SCALE = tl.constexpr(2.0**-noise.BITS)
TAIL = tl.constexpr(1.0 - 1e-3)
"""Covers the rounding of the bound's sums."""


@jit
def _adjusted(read, row, at, size, stride):
    """float32 logits of the tokens `at` after mask, penalties and bias; -inf beyond the vocabulary."""
    logits, settings, floats, masks, drafts, counts, prompt, bias, touched, allowed = read
    inside = at < size
    own = settings + row * COLUMNS
    x = tl.load(logits + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    width = (size + 7) // 8
    mask = tl.load(own + MASK)
    if mask >= 0:
        bits = tl.load(masks + mask * width + at // 8, mask=inside, other=0).to(tl.int32)
        x = x + tl.where(((bits >> (at % 8)) & 1) != 0, 0.0, float("-inf"))
    place = tl.load(own + PLACE)
    if place >= 0:
        word = tl.load(touched + place * ((size + 31) // 32) + at // 32, mask=inside, other=0)
        known = inside & (((word >> (at % 32)) & 1) != 0)
        here = place * size + at
        count = tl.load(counts + here, mask=known, other=0.0)
        first = tl.load(own + FIRST)
        for depth in range(0, tl.load(own + DEPTH).to(tl.int32)):
            count = count + tl.where(at == tl.load(drafts + first + depth), 1.0, 0.0)
        written = count > 0.0
        seen = written | (tl.load(prompt + here, mask=known, other=0) != 0)
        of_row = floats + row * COLUMNS
        repetition = tl.load(of_row + REPETITION).to(tl.float32)
        x = tl.where(seen, tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition), x)
        x = x - tl.load(of_row + PRESENCE).to(tl.float32) * written.to(tl.float32)
        x = x - tl.load(of_row + FREQUENCY).to(tl.float32) * count
        x = x + tl.load(bias + here, mask=known, other=0.0)
        bits = tl.load(allowed + place * width + at // 8, mask=inside, other=0).to(tl.int32)
        x = x + tl.where(((bits >> (at % 8)) & 1) != 0, 0.0, float("-inf"))
    return tl.where(inside, x, float("-inf"))


@jit
def _key(x):
    """float32 -> int32 in the same order; zeros are one, whatever their sign."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _value(key):
    """The float32 of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _weight(shifted):
    """exp of float32 <= 0 as whole UNITs, rounded down."""
    return (tl.exp(shifted) * UNIT).to(tl.int64)


@jit
def _bits(key, token):
    """The draws of tokens as uint64 below 2^32 (`slipstream.speculation.noise`)."""
    state = key + (token + 1).to(tl.uint64) * GOLDEN
    state = (state ^ (state >> 30)) * FIRST_FACTOR
    state = (state ^ (state >> 27)) * SECOND_FACTOR
    return (state ^ (state >> 31)) >> 32


@jit
def _race(shifted, key, at):
    """float32 logits less their largest, of tokens that stay -> the best score, float64, and whose it is.

    Noise in float32 leaves one or two tokens that may win; these are scored in float64.
    """
    bits = _bits(key, at)
    u = (bits.to(tl.uint32).to(tl.float32) + 0.5) * SCALE
    missing = ((bits ^ ONES).to(tl.uint32).to(tl.float32) + 0.5) * SCALE
    # -log U; near 1 float32 does not know U, but 1 - U.
    waited = tl.where(missing < 0.015625, missing * (1.0 + missing * (0.5 + missing * 0.33333334)), -tl.log(u))
    rough = tl.where(shifted >= -REACH, shifted - tl.log(waited), float("-inf"))
    peak = tl.reduce(rough, 0, tl.standard._elementwise_max)
    bound = peak - MARGIN
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.full((), NO_TOKEN, tl.int32)
    while (peak >= bound) & (peak > float("-inf")):
        token = tl.reduce(tl.where(rough == peak, at, NO_TOKEN), 0, tl.standard._elementwise_min)
        logit = tl.reduce(tl.where(at == token, shifted, float("-inf")), 0, tl.standard._elementwise_max)
        u64 = (_bits(key, token).to(tl.float64) + 0.5) * SCALE
        score = logit.to(tl.float64) - tl.log(-tl.log(u64))
        ahead = (score > best) | ((score == best) & (token < winner))
        best = tl.where(ahead, score, best)
        winner = tl.where(ahead, token, winner)
        rough = tl.where(at == token, float("-inf"), rough)
        peak = tl.reduce(rough, 0, tl.standard._elementwise_max)
    return best, winner


@jit
def survey(read, maxima, best, winners, broken, size, stride, parts, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Grid (R, parts). Of each group its largest logit; of each block that too, whose it is, and whether one is no
    number that may be chosen from."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = _adjusted(read, row, at, size, stride)
    bad = (x != x) | (x == float("inf"))
    tl.store(broken + row * parts + part, tl.reduce(bad.to(tl.int32), 0, tl.standard._elementwise_max))
    x = tl.where(x != x, float("-inf"), x)
    tops = tl.reduce(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1, tl.standard._elementwise_max)
    tl.store(maxima + (row * parts + part) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP), tops)
    top = tl.reduce(tops, 0, tl.standard._elementwise_max)
    tl.store(best + row * parts + part, top.to(tl.float64))
    winner = tl.reduce(tl.where(x == top, at, NO_TOKEN), 0, tl.standard._elementwise_min)
    tl.store(winners + row * parts + part, winner)


@jit
def prepare(
    settings, floats, maxima, broken, row_broken, row_floats, found, size, parts, groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (R,). A row's OFFSET, PEAK and BOUND, and whether it is broken. GROUPS and PARTS: powers of 2 that groups
    and parts fit into."""
    row = tl.program_id(0).to(tl.int64)
    at, blocks = tl.arange(0, GROUPS), tl.arange(0, PARTS)
    tops = tl.load(maxima + row * groups + at, mask=at < groups, other=float("-inf"))
    bad = tl.load(broken + row * parts + blocks, mask=blocks < parts, other=0)
    top = tl.reduce(tops, 0, tl.standard._elementwise_max)
    is_bad = (tl.reduce(bad, 0, tl.standard._elementwise_max) != 0) | (top == float("-inf"))
    tl.store(row_broken + row, is_bad.to(tl.int32))
    tl.store(found + row, 0)
    if is_bad == 0:
        temperature = tl.load(floats + row * COLUMNS + TEMPERATURE).to(tl.float32)
        # A tiny temperature would make the largest infinite.
        offset = tl.where(tl.abs(tl.div_rn(top, temperature)) == float("inf"), top, 0.0)
        peak = tl.div_rn(top - offset, temperature)
        tops = tl.div_rn(tops - offset, temperature)
        keys = _key(tops)
        top_k = tl.load(settings + row * COLUMNS + TOP_K)
        top_p = tl.load(floats + row * COLUMNS + TOP_P)
        low = tl.full((), LOWEST, tl.int64)
        high = _key(peak).to(tl.int64)
        bound = tl.full((), float("-inf"), tl.float32)
        if (top_k > 0) & (top_k < size):
            # As many groups reach it as tokens are wanted: so do as many tokens.
            if top_k <= groups:
                while low < high:
                    middle = low + (high - low + 1) // 2
                    enough = tl.reduce((keys >= middle).to(tl.int64), 0, tl.standard._sum_combine) >= top_k
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle - 1)
                bound = _value(low.to(tl.int32))
        else:
            if top_p < 1.0:
                # All tokens below it together weigh less than what top-p leaves out.
                lasting = tl.reduce(tl.exp(tops - peak), 0, tl.standard._sum_combine)
                spare = (1.0 - top_p).to(tl.float32) * lasting * TAIL
                while low < high:
                    middle = low + (high - low + 1) // 2
                    below = tl.exp(tl.minimum(tops, _value(middle.to(tl.int32))) - peak)
                    fits = tl.reduce(below, 0, tl.standard._sum_combine) * GROUP <= spare
                    low = tl.where(fits, middle, low)
                    high = tl.where(fits, high, middle - 1)
                bound = _value(low.to(tl.int32))
        tl.store(row_floats + row * 3 + OFFSET, offset)
        tl.store(row_floats + row * 3 + PEAK, peak)
        tl.store(row_floats + row * 3 + BOUND, bound)


@jit
def _gather(x, at, bound, row, found, values, tokens, CAPACITY: tl.constexpr):
    """Appends the tokens `at` whose logits x reach the bound to the row's, in any order, as far as there is room."""
    stays = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
    count = tl.reduce(stays, 0, tl.standard._sum_combine)
    slot = tl.atomic_add(found + row, count) + tl.associative_scan(stays, 0, tl.standard._sum_combine) - 1
    fits = (stays != 0) & (slot < CAPACITY)
    tl.store(values + row * CAPACITY + slot, x, mask=fits)
    tl.store(tokens + row * CAPACITY + slot, at, mask=fits)


@jit
def race(
    read, maxima, best, winners, row_broken, row_floats, found, values, tokens, sums, size, stride, parts,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Grid (R, parts). A block's best token; for rows under top-k or top-p the tokens that may stay, in any order, as
    far as there is room, and how much all of the block weigh."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, of_row = read[1] + row * COLUMNS, read[2] + row * COLUMNS
    if (tl.load(row_broken + row) == 0) & (tl.load(own + GREEDY) == 0):
        tl.store(best + row * parts + part, float("-inf"))
        tl.store(winners + row * parts + part, NO_TOKEN)
        offset = tl.load(row_floats + row * 3 + OFFSET)
        peak = tl.load(row_floats + row * 3 + PEAK)
        bound = tl.load(row_floats + row * 3 + BOUND)
        temperature = tl.load(of_row + TEMPERATURE).to(tl.float32)
        top_k = tl.load(own + TOP_K)
        ranked = (top_k > 0) & (top_k < size)
        by_mass = (tl.load(of_row + TOP_P) < 1.0) & (ranked == 0)
        tops = tl.load(maxima + (row * parts + part) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP))
        top = tl.div_rn(tl.reduce(tops, 0, tl.standard._elementwise_max) - offset, temperature)
        if (top >= bound) | by_mass:
            at = part * BLOCK + tl.arange(0, BLOCK)
            x = _adjusted(read, row, at, size, stride)
            x = tl.div_rn(x - offset, temperature)
            if ranked | by_mass:
                if by_mass:
                    tl.store(sums + row * parts + part, tl.reduce(_weight(x - peak), 0, tl.standard._sum_combine))
                _gather(x, at, bound, row, found, values, tokens, CAPACITY)
            else:
                x = tl.where(x < peak + tl.load(of_row + FLOOR).to(tl.float32), float("-inf"), x)
                score, winner = _race(x - peak, tl.load(own + KEY).to(tl.uint64, bitcast=True), at)
                tl.store(best + row * parts + part, score)
                tl.store(winners + row * parts + part, winner)


@jit
def _some(read, gathered, row, at, count, offset, temperature, size, stride):
    """Logits of a row's tokens that may stay: of those gathered, or where these had no room, of all."""
    values, _, capacity = gathered
    if count <= capacity:
        x = tl.load(values + row * capacity + at, mask=at < count, other=float("-inf"))
    else:
        x = tl.div_rn(_adjusted(read, row, at, size, stride) - offset, temperature)
    return x


@jit
def _ids(gathered, row, at, count, wanted):
    """Whose logits the wanted ones are."""
    _, tokens, capacity = gathered
    ids = at
    if count <= capacity:
        ids = tl.load(tokens + row * capacity + at, mask=wanted & (at < count), other=NO_TOKEN)
    return ids


@jit
def _largest(
    read, gathered, row, length, count, offset, temperature, peak, size, stride, low, high, goal, tie,
    KIND: tl.constexpr, CHUNK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The largest limit in low..high that reaches the goal, or low: keys that enough tokens have at least (COUNT), keys
    that tokens of enough weight have at least (MASS), negative ids of enough of the tokens of logit `tie` (TIES)."""
    while low < high:
        limits = low + (high - low) * (1 + tl.arange(0, WAYS)).to(tl.int64) // WAYS
        least = _value(limits.to(tl.int32))
        reached = tl.full((WAYS,), 0, tl.int64)
        for start in range(0, length, CHUNK):
            at = start + tl.arange(0, CHUNK)
            x = _some(read, gathered, row, at, count, offset, temperature, size, stride)
            if KIND == TIES:
                ids = _ids(gathered, row, at, count, x == tie)
                inside = (x == tie)[None, :] & ((0 - ids)[None, :] >= limits[:, None])
                reached += tl.reduce(inside.to(tl.int64), 1, tl.standard._sum_combine)
            elif KIND == MASS:
                weights = tl.where(x[None, :] >= least[:, None], _weight(x - peak)[None, :], 0)
                reached += tl.reduce(weights, 1, tl.standard._sum_combine)
            else:
                reached += tl.reduce((x[None, :] >= least[:, None]).to(tl.int64), 1, tl.standard._sum_combine)
        enough = reached.to(tl.float64) >= goal
        higher = tl.reduce(tl.where(enough, limits, low), 0, tl.standard._elementwise_max)
        high = tl.reduce(tl.where(enough, high, limits - 1), 0, tl.standard._elementwise_min)
        low = higher
    return low


@jit
def _tally(read, gathered, row, length, count, offset, temperature, peak, size, stride, limit, CHUNK: tl.constexpr):
    """Tokens above a logit, what they weigh, and tokens that equal it."""
    above, mass, ties = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for start in range(0, length, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = _some(read, gathered, row, at, count, offset, temperature, size, stride)
        above += tl.reduce((x > limit).to(tl.int64), 0, tl.standard._sum_combine)
        mass += tl.reduce(tl.where(x > limit, _weight(x - peak), 0), 0, tl.standard._sum_combine)
        ties += tl.reduce((x == limit).to(tl.int64), 0, tl.standard._sum_combine)
    return above, mass, ties


@jit
def cut(
    read, best, winners, row_broken, row_floats, found, values, tokens, sums, size, stride, parts,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, WAYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (R,). The best token of a row under top-k or top-p: tokens above a logit stay, of those that equal it the
    lowest ids. Both bounds are narrowed down to a WAYS-th at a time."""
    row = tl.program_id(0).to(tl.int64)
    own, of_row = read[1] + row * COLUMNS, read[2] + row * COLUMNS
    top_k, top_p = tl.load(own + TOP_K), tl.load(of_row + TOP_P)
    ranked = (top_k > 0) & (top_k < size)
    if (tl.load(row_broken + row) == 0) & (tl.load(own + GREEDY) == 0) & (ranked | (top_p < 1.0)):
        offset = tl.load(row_floats + row * 3 + OFFSET)
        peak = tl.load(row_floats + row * 3 + PEAK)
        temperature = tl.load(of_row + TEMPERATURE).to(tl.float32)
        gathered = (values, tokens, CAPACITY)
        count = tl.load(found + row)
        length = tl.where(count <= CAPACITY, count, size)
        lowest = tl.maximum(_key(tl.load(row_floats + row * 3 + BOUND)).to(tl.int64), LOWEST)
        highest = _key(peak).to(tl.int64)
        key = lowest
        room = tl.full((), NO_TOKEN, tl.int64)
        ties = tl.full((), 0, tl.int64)
        if ranked:
            key = _largest(
                read, gathered, row, length, count, offset, temperature, peak, size, stride, lowest, highest,
                top_k.to(tl.float64), 0.0, COUNT, CHUNK, WAYS,
            )  # fmt: skip
            limit = _value(key.to(tl.int32))
            above, total, ties = _tally(
                read, gathered, row, length, count, offset, temperature, peak, size, stride, limit, CHUNK
            )
            room = top_k - above
            total += tl.minimum(room, ties) * _weight(limit - peak)
        else:
            at = tl.arange(0, PARTS)
            block_sums = tl.load(sums + row * parts + at, mask=at < parts, other=0)
            total = tl.reduce(block_sums, 0, tl.standard._sum_combine)
        if top_p < 1.0:
            goal = top_p * total.to(tl.float64)
            last = key
            key = _largest(
                read, gathered, row, length, count, offset, temperature, peak, size, stride, last, highest,
                goal, 0.0, MASS, CHUNK, WAYS,
            )  # fmt: skip
            limit = _value(key.to(tl.int32))
            above, mass, ties = _tally(
                read, gathered, row, length, count, offset, temperature, peak, size, stride, limit, CHUNK
            )
            weight = tl.maximum(_weight(limit - peak), 1)
            wanted = tl.ceil((goal - mass.to(tl.float64)) / weight.to(tl.float64))
            wanted = tl.minimum(tl.maximum(wanted, 1.0), 2147483647.0).to(tl.int64)
            room = tl.where(key == last, tl.minimum(room, wanted), wanted)
        limit = _value(key.to(tl.int32))
        newest = tl.full((), 0, tl.int64) + size
        if room < ties:
            newest = 0 - _largest(
                read, gathered, row, length, count, offset, temperature, peak, size, stride, 1 - newest, newest * 0,
                room.to(tl.float64), limit, TIES, CHUNK, WAYS,
            )  # fmt: skip
        floor = peak + tl.load(of_row + FLOOR).to(tl.float32)
        noise_key = tl.load(own + KEY).to(tl.uint64, bitcast=True)
        score = tl.full((), float("-inf"), tl.float64)
        winner = tl.full((), NO_TOKEN, tl.int32)
        for start in range(0, length, CHUNK):
            at = start + tl.arange(0, CHUNK)
            x = _some(read, gathered, row, at, count, offset, temperature, size, stride)
            ids = _ids(gathered, row, at, count, x >= limit)
            stays = ((x > limit) | ((x == limit) & (ids <= newest))) & (x >= floor)
            own_score, own_winner = _race(tl.where(stays, x - peak, float("-inf")), noise_key, ids)
            ahead = (own_score > score) | ((own_score == score) & (own_winner < winner))
            score = tl.where(ahead, own_score, score)
            winner = tl.where(ahead, own_winner, winner)
        tl.store(best + row * parts, score)
        tl.store(winners + row * parts, winner)


@partial(jit, varying=("width", "total"))
def accept(
    settings, requests, drafts, best, winners, row_broken, decided, parts, width, total,
    PARTS: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Grid (N,). Each request's winners up to the first that is not the candidate behind its row, then PADDING; 0 for
    a broken row, which ends it. Behind the tokens of all: how many there are, how many candidates are not among them,
    whether a row was broken, and 0."""
    request = tl.program_id(0).to(tl.int64)
    start, chain = tl.load(requests + 3 * request), tl.load(requests + 3 * request + 1)
    first = tl.load(settings + start * COLUMNS + FIRST)
    at = tl.arange(0, PARTS)
    going = tl.load(requests + 3 * request + 2).to(tl.int32)
    bad = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    rest = going * (chain.to(tl.int32) + 1)
    for depth in range(0, width):
        token = tl.full((), PADDING, tl.int32)
        if going != 0:
            row = start + depth
            count += 1
            if tl.load(row_broken + row) != 0:
                bad = tl.full((), 1, tl.int32)
                going = tl.full((), 0, tl.int32)
                token = tl.full((), 0, tl.int32)
            else:
                scores = tl.load(best + row * parts + at, mask=at < parts, other=float("-inf"))
                top = tl.reduce(scores, 0, tl.standard._elementwise_max)
                ids = tl.load(winners + row * parts + at, mask=at < parts, other=NO_TOKEN)
                token = tl.reduce(tl.where(scores == top, ids, NO_TOKEN), 0, tl.standard._elementwise_min)
                draft = tl.load(drafts + first + depth, mask=depth < chain, other=-2).to(tl.int32)
                going = (draft == token).to(tl.int32)
        tl.store(decided + request * width + depth, token)
    behind = decided + total * width + request
    tl.store(behind, count)
    tl.store(behind + total, rest - count)
    tl.store(behind + 2 * total, bad)
    tl.store(behind + 3 * total, tl.full((), 0, tl.int32))


@partial(jit, varying=("width",))
def count(places, emitted, counts, touched, size, width):
    """Grid (K, width). Adds emitted tokens [K, width] to the counts at their sessions' places; none are below 0."""
    session = tl.program_id(0).to(tl.int64)
    token = tl.load(emitted + session * width + tl.program_id(1)).to(tl.int64)
    if token >= 0:
        place = tl.load(places + session)
        tl.atomic_add(counts + place * size + token, 1.0)
        bit = tl.full((), 1, tl.int32) << (token % 32).to(tl.int32)
        tl.atomic_or(touched + place * ((size + 31) // 32) + token // 32, bit)
