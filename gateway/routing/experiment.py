"""An experiment on live traffic: which arm a session belongs to, and which drafters the arm uses.

    EXPERIMENT = ARM (";" ARM)*
    ARM        = NAME ":" WEIGHT (ACTIONS | SHADOWS | ACTIONS SHADOWS)?
    ACTIONS    = as in `gateway.routing.rules`: "off", or drafters=A+B and max_draft_tokens=N
    SHADOWS    = "shadow=" NAME ("+" NAME)*           they draft without serving; not with "off"

For example: `old: 80 drafters=model; new: 15 drafters=suffix; plain: 5 off`, or `rest: 95; watched: 5 shadow=suffix`.
The first arm is what the others are compared with. An arm without actions does what is done without an experiment.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate

from gateway.routing.rules import NO_RULE, Rule, check_known, read_actions
from slipstream.errors import InvalidArgument

SETTING = "GATEWAY_EXPERIMENT"
MAX_ARMS = 8
MAX_SHADOWS = 2
"""Most shadows of one arm: each costs the verifier as much receiving as a drafter does."""
MAX_WEIGHT = 1_000_000
NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
SHADOW = "shadow="
_SPAN = 2**64


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    weight: int
    rule: Rule = NO_RULE
    """The actions of the arm; the rule has no conditions."""
    shadows: tuple[str, ...] = ()

    def __str__(self) -> str:
        """In the grammar above; parsing it gives an equal arm."""
        actions = str(self.rule).partition(": ")[2]
        shadows = f"{SHADOW}{'+'.join(self.shadows)}" if self.shadows else ""
        return " ".join(filter(None, [f"{self.name}: {self.weight}", actions, shadows]))


@dataclass(frozen=True, slots=True)
class Experiment:
    """Sessions are assigned to arms by a hash of `name` and the session's id."""

    name: str
    arms: tuple[Arm, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.arms))

    @property
    def reserved(self) -> frozenset[str]:
        """Drafters that are shadows and serve in no arm: they serve only sessions that name them."""
        serving = {name for arm in self.arms for name in arm.rule.drafters}
        return frozenset(name for arm in self.arms for name in arm.shadows) - serving

    def arm_of(self, session: str) -> Arm:
        """A function of the experiment's name, its weights and the session's id alone: the same on every gateway,
        however often the session is taken up."""
        weights = list(accumulate(arm.weight for arm in self.arms))
        return self.arms[bisect_right(weights, self._draw(session)[0] * weights[-1] // _SPAN)]

    def priority(self, session: str) -> int:
        """64 random bits of the session, independent of its arm: samples are chosen by them."""
        return self._draw(session)[1]

    def _draw(self, session: str) -> tuple[int, int]:
        digest = hashlib.blake2b(f"{self.name}\0{session}".encode(), digest_size=16).digest()
        return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


def parse(name: str, text: str, known: Collection[str]) -> Experiment | None:
    """The experiment, on drafters named in `known` alone; None for none. Raises InvalidArgument that names the arm and
    what is wrong."""
    parts = [part for part in (part.strip() for part in text.split(";")) if part]
    if not parts:
        return None
    if not NAME.fullmatch(name):
        raise InvalidArgument(f"{SETTING}_NAME={name!r}; use 1 to 32 of the characters A-Z a-z 0-9 _ -.")
    if len(parts) > MAX_ARMS:
        raise InvalidArgument(f"{SETTING} has {len(parts)} arms; give at most {MAX_ARMS}.")
    arms: dict[str, Arm] = {}
    for number, part in enumerate(parts, 1):
        try:
            arm = _arm(part, known)
            if arm.name in arms:
                raise ValueError(f"another arm is named {arm.name!r} too; give each a name of its own.")
        except ValueError as error:
            raise InvalidArgument(f"{SETTING}, arm {number} ({part!r}): {error}") from None
        arms[arm.name] = arm
    return Experiment(name, tuple(arms.values()))


def _arm(text: str, known: Collection[str]) -> Arm:
    """Raises ValueError with a sentence."""
    name, colon, rest = (each.strip() for each in text.partition(":"))
    if not colon or not NAME.fullmatch(name):
        raise ValueError("write NAME: WEIGHT ACTIONS, the name of 1 to 32 of the characters A-Z a-z 0-9 _ -.")
    weight, *words = rest.split() or [""]
    if not re.fullmatch("[0-9]{1,7}", weight) or not 0 < int(weight) <= MAX_WEIGHT:
        raise ValueError(f"its weight is {weight!r}; give a whole number from 1 to {MAX_WEIGHT} after the colon.")
    shadow_words = [word for word in words if word.startswith(SHADOW)]
    action_words = [word for word in words if not word.startswith(SHADOW)]
    off, drafters, most = read_actions(action_words, known) if action_words else (False, (), None)
    shadows = _shadows(shadow_words, known)
    if off and shadows:
        raise ValueError("no drafter proposes without speculation; take the shadow to an arm that speculates.")
    if both := sorted(set(shadows) & set(drafters)):
        raise ValueError(f"{both[0]} serves in this arm; it cannot be its shadow too.")
    return Arm(name, int(weight), Rule(off=off, drafters=drafters, max_draft_tokens=most), shadows)


def _shadows(words: list[str], known: Collection[str]) -> tuple[str, ...]:
    if not words:
        return ()
    names = tuple(words[0].removeprefix(SHADOW).split("+"))
    if len(words) > 1 or len(names) > MAX_SHADOWS or len(set(names)) < len(names):
        raise ValueError(f"give shadow=A+B once, with at most {MAX_SHADOWS} different drafters.")
    check_known(names, known)
    return names
