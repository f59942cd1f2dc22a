"""Tables of the rounds in which all systems answered chat prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence

from benchmarks.peers.turns import Round, Run
from benchmarks.records import Row
from measurement.load.paired import paired_ratio
from measurement.pairs.loops import DISTINCT, distinct_share

Speed = Callable[[Run], float | None]


def whole(run: Run) -> float | None:
    return run.tokens_per_s


def decoding(run: Run) -> float | None:
    return run.decoding_per_s


def summary(found: Sequence[Round], systems: Sequence[str], plain: Collection[str], expected: str) -> list[Row]:
    """A row for each system and number of requests at once. Ratios are to the plain peer that is fastest at that
    number, `best` in its own row; `same`: the share of texts that are those of the system `expected`; `loops`: the
    share of texts in which fewer than 0.6 of the 4-grams differ. CPU time is that of all the system's threads and of
    the client, with the prompts' own."""
    rows: list[Row] = []
    for at_once in sorted({each.at_once for each in found}):
        some = [each for each in found if each.at_once == at_once]
        there = [name for name in systems if all(name in each.runs for each in some)]
        best = fastest(some, [name for name in there if name in plain])
        rows += [_row(some, name, best, expected) for name in there]
    return rows


def fastest(found: Sequence[Round], names: Sequence[str]) -> str:
    return max(names, key=lambda name: speed(found, name, whole) or 0.0)


def speed(found: Sequence[Round], name: str, of: Speed) -> float | None:
    """The median of the rounds; None where the system does not tell."""
    known = [value for each in found if (value := of(each.runs[name])) is not None]
    return statistics.median(known) if known else None


def ratio(found: Sequence[Round], name: str, to: str, of: Speed) -> tuple[float, str] | None:
    """The geometric mean over rounds, and its 95 % interval."""
    both = [(of(each.runs[to]), of(each.runs[name])) for each in found]
    pairs = [(old, new) for old, new in both if old is not None and new is not None]
    known = paired_ratio([old for old, _ in pairs], [new for _, new in pairs])
    if known is None:
        return None
    return known.value, "" if known.low is None or known.high is None else f"{known.low:.2f}-{known.high:.2f}"


def _row(found: Sequence[Round], name: str, best: str, expected: str) -> Row:
    at_once, texts = found[0].at_once, [each.runs[name].answer.outputs for each in found]
    alone = at_once == 1
    to_best = ratio(found, name, best, whole)
    behind = ratio(found, name, best, decoding) if alone else None
    passes = [each.runs[name].answer.passes for each in found] if alone else []
    known = [count for count in passes if count]
    decided = sum(each.runs[name].tokens for each in found)
    flat = [text for some in texts for text in some]
    theirs = [text for each in found if expected in each.runs for text in each.runs[expected].answer.outputs]
    same = sum(one == other for one, other in zip(flat, theirs, strict=True)) / len(theirs) if theirs and flat else None
    return {
        "at_once": at_once,
        "system": name,
        "rounds": len(found),
        "disturbed": sum(each.disturbed for each in found),
        "tokens_per_s": speed(found, name, whole),
        "x_best_plain": None if to_best is None else to_best[0],
        "interval": "best" if name == best else None if to_best is None else to_best[1] or None,
        "decoding_per_s": speed(found, name, decoding) if alone else None,
        "x_decoding": None if behind is None else behind[0],
        "least_x_decoding": _least(found, name, best) if alone else None,
        "cpu_ms_a_token": 1e3 * sum(each.runs[name].seen.own_s for each in found) / max(1, decided),
        "tokens_a_pass": decided / sum(known) if known and len(known) == len(passes) else None,
        "same": same,
        "loops": sum(distinct_share(text) < DISTINCT for text in flat) / len(flat) if flat else None,
    }


def _least(found: Sequence[Round], name: str, to: str) -> float | None:
    """The ratio of the round in which the system was slowest beside the other one."""
    both = [(decoding(each.runs[to]), decoding(each.runs[name])) for each in found]
    return min((new / old for old, new in both if old is not None and new is not None), default=None)


def by_category(found: Sequence[Round], systems: Sequence[str], plain: Collection[str]) -> list[Row]:
    """A row for each category of prompts that are asked alone: tokens/s of the fastest plain peer on all of them, and
    each system's ratio to it, both with the prompts' own time."""
    alone = [each for each in found if each.at_once == 1]
    if not alone:
        return []
    there = [name for name in systems if all(name in each.runs for each in alone)]
    best = fastest(alone, [name for name in there if name in plain])
    rows: list[Row] = []
    for category in dict.fromkeys(each.category for each in alone):
        some = [each for each in alone if each.category == category]
        texts = [text for each in some for text in each.runs[best].answer.outputs]
        row: Row = {
            "category": category,
            "prompt_tokens": statistics.fmean(len(each.chats[0].token_ids) for each in some),
            "loops": sum(distinct_share(text) < DISTINCT for text in texts) / len(texts) if texts else None,
            f"{best}, tokens/s": speed(some, best, whole),
        }
        for name in there:
            if name != best:
                value = ratio(some, name, best, whole)
                row[name] = None if value is None else value[0]
        rows.append(row)
    return rows
