"""Rounds in which every system answers the same chat prompts, one right after the other.

What a shared machine does to one system it does to its neighbours: figures are compared within a round. The order turns
from round to round. A round is disturbed where others took too much of the machine in any of its runs; it is repeated,
and the least disturbed try counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.chats import Chat
from benchmarks.peers.disturbance import Seen, Watch
from benchmarks.peers.systems import Answer, System


@dataclass(frozen=True, slots=True)
class Run:
    """One system's answer to a round's prompts."""

    answer: Answer
    seen: Seen

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answer.outputs))

    @property
    def tokens_per_s(self) -> float:
        """With the prompts' own time."""
        return self.tokens / self.answer.seconds

    @property
    def decoding_per_s(self) -> float | None:
        """Behind the first token; None where the system does not tell, and for texts of one token."""
        seconds = self.answer.decoding_s
        return (self.tokens - 1) / seconds if seconds and self.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Round:
    at_once: int
    chats: Sequence[Chat]
    runs: dict[str, Run] = field(default_factory=dict)
    """By system; one that failed is missing."""

    @property
    def disturbance(self) -> float:
        """Percent of the machine's time in the worst run."""
        return max(run.seen.steal + run.seen.others for run in self.runs.values())

    @property
    def disturbed(self) -> bool:
        return any(run.seen.disturbed for run in self.runs.values())

    @property
    def category(self) -> str:
        """Empty for a round of several."""
        categories = {chat.category for chat in self.chats}
        return categories.pop() if len(categories) == 1 else ""


async def one_round(systems: Mapping[str, System], chats: Sequence[Chat], tokens: int, first: int) -> Round:
    """Begins with the system number `first`."""
    found = Round(len(chats), chats)
    names = list(systems)
    start = first % len(names)
    for name in names[start:] + names[:start]:
        watch = Watch()
        answer = await systems[name]([chat.token_ids for chat in chats], tokens)
        found.runs[name] = Run(answer, watch.seen())
    return found


async def rounds(
    systems: Mapping[str, System], chats: Sequence[Chat], at_once: int, tokens: int, tries: int, limit_s: float
) -> list[Round]:
    """A round for every `at_once` prompts, in their order, until the time is over; at least one."""
    ends, kept = time.monotonic() + limit_s, list[Round]()
    for first in range(0, len(chats) - at_once + 1, at_once):
        tried = list[Round]()
        while len(tried) < tries and not (tried and not tried[-1].disturbed):
            if (kept or tried) and time.monotonic() > ends:
                break
            tried.append(await one_round(systems, chats[first : first + at_once], tokens, len(kept)))
        if not tried:
            break
        kept.append(min(tried, key=lambda each: each.disturbance))
        print(f"{time.strftime('%H:%M:%S')} {at_once} at once, round {len(kept)}, tries {len(tried)}", flush=True)
    return kept
