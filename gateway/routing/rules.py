"""The operator's rules of routing: which requests speculate, with which drafters, and how
far. The first rule that fits a request counts.

    RULES      = RULE (";" RULE)*
    RULE       = CONDITIONS ":" ACTIONS
    CONDITIONS = "any" | CONDITION+                   all of them must hold
    CONDITION  = "key=" NAME | "workload=" WORD | "salt=" WORD | LENGTH
    LENGTH     = ("max_tokens" | "prompt_tokens") ("<" | "<=" | "=" | ">" | ">=") NUMBER
    ACTIONS    = "off" | ACTION+
    ACTION     = "drafters=" NAME ("+" NAME)* | "max_draft_tokens=" NUMBER

For example: `max_tokens<16: off; workload=chat prompt_tokens>=4096: drafters=ngram+suffix; any: max_draft_tokens=4`,
or `key=acme: drafters=suffix` for one tenant. A key is named as in the file of API keys; a workload and a salt are
what the request says. A word holds no blank, colon or semicolon.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from slipstream.client.gateway_endpoint import KEY_NAME
from slipstream.errors import InvalidArgument
from slipstream.rpc.proto_conversion import MAX_LABEL_BYTES

SETTING = "GATEWAY_RULES"
ANY = "any"
OFF = "off"
LABELS = ("key", "workload", "salt")
LENGTHS = ("max_tokens", "prompt_tokens")
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    ">": operator.gt,
    ">=": operator.ge,
}
_PART = re.compile(r"(?P<name>[a-z_]+)(?P<sign><=|>=|<|>|=)(?P<value>[^\s:;]+)")
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class RuleInput:
    """The properties of a request that conditions are checked against."""

    workload: str
    salt: str
    max_tokens: int
    """Most output tokens, after the default and the model's length are applied."""
    prompt_tokens: int
    key: str = ""
    """Name of the API key; empty on a gateway without keys."""

    def length(self, name: str) -> int:
        return self.max_tokens if name == "max_tokens" else self.prompt_tokens


@dataclass(frozen=True, slots=True)
class RuleBound:
    """A condition on a length, such as max_tokens<16."""

    name: str
    sign: str
    value: int

    def holds(self, request: RuleInput) -> bool:
        return COMPARISONS[self.sign](request.length(self.name), self.value)

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.value}"


@dataclass(frozen=True, slots=True)
class Rule:
    key: str | None = None
    workload: str | None = None
    salt: str | None = None
    bounds: tuple[RuleBound, ...] = ()
    off: bool = False
    """No speculation."""
    drafters: tuple[str, ...] = ()
    """Drafters to choose from; empty: all."""
    max_draft_tokens: int | None = None
    """Never more than the gateway's own limit."""

    def fits(self, request: RuleInput) -> bool:
        return (
            self.key in (None, request.key)
            and self.workload in (None, request.workload)
            and self.salt in (None, request.salt)
            and all(bound.holds(request) for bound in self.bounds)
        )

    def __str__(self) -> str:
        """In the grammar above; parsing it gives an equal rule."""
        labels = [f"{name}={value}" for name in LABELS if (value := getattr(self, name)) is not None]
        conditions = [*labels, *map(str, self.bounds)] or [ANY]
        actions = [OFF] if self.off else []
        if self.drafters:
            actions.append(f"drafters={'+'.join(self.drafters)}")
        if self.max_draft_tokens is not None:
            actions.append(f"max_draft_tokens={self.max_draft_tokens}")
        return f"{' '.join(conditions)}: {' '.join(actions)}"


NO_RULE = Rule()


def choose(rules: Sequence[Rule], request: RuleInput) -> Rule:
    """The first rule that fits, or NO_RULE."""
    return next((rule for rule in rules if rule.fits(request)), NO_RULE)


def parse(text: str, known: Collection[str]) -> tuple[Rule, ...]:
    """Parse the rules; they may name only drafters in `known`. Raises InvalidArgument with the rule and its error."""
    rules = []
    for number, part in enumerate((part.strip() for part in text.split(";")), 1):
        if not part:
            continue
        try:
            rules.append(_rule(part, known))
        except ValueError as error:
            raise InvalidArgument(f"{SETTING}, rule {number} ({part!r}): {error}") from None
    return tuple(rules)


def _rule(text: str, known: Collection[str]) -> Rule:
    """Raises ValueError with a sentence."""
    conditions, colon, actions = text.partition(":")
    if not colon:
        raise ValueError("there is no colon; write CONDITIONS: ACTIONS.")
    labels, bounds = _conditions(conditions.split())
    off, drafters, most = read_actions(actions.split(), known)
    return Rule(
        **{name: labels.get(name) for name in LABELS}, bounds=bounds, off=off, drafters=drafters, max_draft_tokens=most
    )


def _conditions(words: list[str]) -> tuple[dict[str, str], tuple[RuleBound, ...]]:
    labels: dict[str, str] = {}
    bounds: list[RuleBound] = []
    if not words or (ANY in words and len(words) > 1):
        raise ValueError(f"give conditions before the colon, or {ANY!r} alone for every request.")
    for word in words if words != [ANY] else []:
        name, sign, value = _part(word)
        if name in LENGTHS:
            bounds.append(RuleBound(name, sign, _number(name, value)))
        elif name not in LABELS or sign != "=":
            choices = f"{', '.join(f'{label}=WORD' for label in LABELS)} and {' or '.join(LENGTHS)} with < <= = > >="
            raise ValueError(f"{word!r} is no condition; there are {choices}.")
        elif name in labels:
            raise ValueError(f"{name} is given twice; write a rule for each.")
        elif name == "key" and not KEY_NAME.fullmatch(value):
            raise ValueError(f"{value!r} is no key's name, which has 1 to 64 letters, digits, _ and -.")
        elif len(value.encode()) > MAX_LABEL_BYTES:
            raise ValueError(f"no {name} has more than {MAX_LABEL_BYTES} bytes.")
        else:
            labels[name] = value
    return labels, tuple(bounds)


def read_actions(words: list[str], known: Collection[str]) -> tuple[bool, tuple[str, ...], int | None]:
    """Returns (off, drafters, most draft tokens). Raises ValueError with a sentence."""
    if words == [OFF]:
        return True, (), None
    given: dict[str, str] = {}
    for word in words:
        name, sign, value = _part(word)
        if name not in ("drafters", "max_draft_tokens") or sign != "=":
            raise ValueError(f"{word!r} is no action; there are {OFF!r} alone, drafters=A+B and max_draft_tokens=N.")
        if name in given:
            raise ValueError(f"{name} is given twice.")
        given[name] = value
    if not given:
        raise ValueError(f"give actions after the colon: {OFF!r}, or drafters=A+B and max_draft_tokens=N.")
    drafters = tuple(given["drafters"].split("+")) if "drafters" in given else ()
    check_known(drafters, known)
    most = _number("max_draft_tokens", given["max_draft_tokens"]) if "max_draft_tokens" in given else None
    if most == 0:
        raise ValueError(f"max_draft_tokens is 0; write {OFF!r}.")
    return False, drafters, most


def check_known(drafters: Iterable[str], known: Collection[str]) -> None:
    """Raises ValueError for a drafter that the gateway does not have."""
    if unknown := [name for name in drafters if name not in known]:
        raise ValueError(f"GATEWAY_DRAFTERS has no {unknown[0]!r}; it names {', '.join(sorted(known)) or 'none'}.")


def _part(word: str) -> tuple[str, str, str]:
    found = _PART.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r} cannot be read; write NAME=VALUE, or a comparison, without blanks.")
    return found["name"], found["sign"], found["value"]


def _number(name: str, value: str) -> int:
    if not _NUMBER.fullmatch(value):
        raise ValueError(f"{name} is compared with {value!r}; give a whole number of at most nine digits.")
    return int(value)
