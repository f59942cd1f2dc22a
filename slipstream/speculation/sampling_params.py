"""The resolved sampling parameters of one session, and the log-probabilities of its output tokens.

All workers of a session have the same `SamplingParams`, which fix the text together with the target: randomness belongs
to the position. The processing order is penalties, bias and allowed tokens, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NoReturn

from slipstream.errors import FIELDS_CONFLICT, NUMBER_OUT_OF_RANGE, TOO_MANY_ITEMS, VALUE_UNKNOWN, InvalidArgument

ACCEPTANCE_RULES = ("coupled", "rejection", "typical")
"""`coupled` needs no draft distribution; `rejection`, the ratio rule, is exact iff the drafter's q is honest. `typical`
is lossy: its texts are not distributed as the target's."""
DEPRECATED_RULES: Mapping[str, str] = MappingProxyType({"block": "rejection", "recursive": "rejection"})
"""Names of former rules, each with the rule that replaced it: the distribution of the output is the same."""
MAX_NAMED_TOKENS = 1024
"""Tokens that one parameter may name."""
LEAST_TEMPERATURE, LEAST_REPETITION_PENALTY = 1e-38, 1e-30
"""Smallest ones above 0. Logits are divided by them in float32, in which a smaller temperature is 0, and a logit of
60,000 over a smaller penalty is infinite."""
MAX_TOP_LOGPROBS = 20
"""Likeliest tokens that a request can ask for at each position."""
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request; neutral values switch a processor off. Raises InvalidArgument for values out of range,
    NaN included."""

    temperature: float = 1.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides the positive (multiplies the negative) logits of tokens seen in prompt or output (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    """Added to the logits of single tokens."""
    seed: int = 0
    """64 unsigned bits."""
    acceptance: str = "coupled"
    """One of ACCEPTANCE_RULES; a name in DEPRECATED_RULES is replaced."""
    allowed_token_ids: tuple[int, ...] = ()
    """The output has these tokens alone; empty: all."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences that the output does not have: the last token of one cannot follow the others. The prompt does not
    count."""

    def __post_init__(self) -> None:
        if self.temperature != 0.0:
            _within("temperature", self.temperature, LEAST_TEMPERATURE, 100.0, "0 (greedy decoding), or ")
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, LEAST_REPETITION_PENALTY, 100.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.top_k < 0:
            _refuse_number("top_k", f"top_k is {self.top_k}; send 0 (all tokens) or a positive number.", least=0)
        if not 0 <= self.seed < 2**64:
            _refuse_number("seed", "seed must fit in 64 unsigned bits.", least=0, most=2**64 - 1)
        object.__setattr__(self, "acceptance", current_rule(self.acceptance))
        for name in ("logit_bias", "allowed_token_ids"):
            check_named_tokens(name, len(getattr(self, name)))
        check_named_tokens("bad_words_ids", sum(max(1, len(each)) for each in self.bad_words_ids))
        if not all(self.bad_words_ids):
            raise InvalidArgument(
                "bad_words_ids holds a sequence without tokens; leave it out.",
                reason="NO_TOKENS",
                field="sampling.bad_words_ids",
            )
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def coupled(self) -> bool:
        """Whether the text depends on no draft."""
        return self.acceptance == "coupled"

    @property
    def drawn(self) -> bool:
        """Whether candidates are draws from a distribution that comes with them, else the likeliest tokens."""
        return self.acceptance == "rejection"

    @property
    def lossy(self) -> bool:
        """Whether tokens are accepted that the target would not have drawn. At temperature 0 none are."""
        return self.acceptance == "typical" and not self.greedy

    @property
    def penalised(self) -> bool:
        """Whether penalties make the distribution depend on earlier tokens beyond what the model does."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def biased(self) -> bool:
        """Whether tokens have a bias, whatever the text is."""
        return bool(self.logit_bias or self.allowed_token_ids)

    @property
    def adjusted(self) -> bool:
        """Whether logits are changed before temperature and cuts."""
        return self.penalised or self.biased

    def below(self, vocabulary: int) -> SamplingParams:
        """These parameters for rows of fewer tokens than the target has."""
        if max((*self.logit_bias, *self.allowed_token_ids), default=0) < vocabulary:
            return self
        return replace(
            self,
            logit_bias={token: bias for token, bias in self.logit_bias.items() if token < vocabulary},
            allowed_token_ids=tuple(token for token in self.allowed_token_ids if token < vocabulary),
        )

    def check_allowed(self, stop_token_ids: Collection[int], vocabulary: int, *, structured: bool, least: bool) -> None:
        """Raises InvalidArgument where no token of so many might be left that the output may go on with. `structured`:
        it is held to a format. `least`: no stop token is allowed at its beginning."""
        for name in ("allowed_token_ids", "bad_words_ids"):
            if structured and getattr(self, name):
                raise InvalidArgument(
                    f"{name.removesuffix('_ids')} and a structured output exclude each other; send one.",
                    reason=FIELDS_CONFLICT,
                    field=f"sampling.{name}",
                )
        barred = {word[-1] for word in self.bad_words_ids} | (set(stop_token_ids) if least else set())
        if self.allowed_token_ids and barred.issuperset(self.allowed_token_ids):
            raise InvalidArgument(
                "allowed_token_ids names tokens alone that bad words end with, or stop tokens, which min_tokens "
                "forbids; allow another token.",
                reason=FIELDS_CONFLICT,
                field="sampling.allowed_token_ids",
            )
        if len(barred) >= vocabulary:
            raise InvalidArgument(
                "bad_words_ids leaves no token that the output may have; name fewer.",
                reason=FIELDS_CONFLICT,
                field="sampling.bad_words_ids",
            )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one output token: log-softmax in float32 of the target's raw logits, before a grammar's
    mask, penalties, bias, temperature and cuts."""

    logprob: float
    """Natural logarithm; -inf for a token that the model itself excludes."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest tokens at this position, best first; equal ones by lowest id."""


def current_rule(name: str) -> str:
    """The acceptance rule of this name, which may be a deprecated one. Raises InvalidArgument for an unknown name."""
    name = DEPRECATED_RULES.get(name, name)
    if name not in ACCEPTANCE_RULES:
        raise InvalidArgument(
            f"acceptance rule {name!r} is unknown; choose one of {ACCEPTANCE_RULES}.",
            reason=VALUE_UNKNOWN,
            field="sampling.acceptance",
        )
    return name


def _within(name: str, value: float, low: float, high: float, other: str = "", *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high
    if not math.isfinite(value) or not inside:
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        sentence = f"{name} is {value}; send {other}a finite number in {bounds}."
        _refuse_number(name, sentence, least=0.0 if other else low, most=high)


def _refuse_number(name: str, sentence: str, **bounds: float) -> NoReturn:
    raise InvalidArgument(sentence, reason=NUMBER_OUT_OF_RANGE, field=f"sampling.{name}", numbers=bounds)


def check_named_tokens(name: str, tokens: int) -> None:
    """Raises InvalidArgument for more tokens than this parameter may name."""
    if tokens > MAX_NAMED_TOKENS:
        raise InvalidArgument(
            f"{name} names more than {MAX_NAMED_TOKENS} tokens; send fewer.",
            reason=TOO_MANY_ITEMS,
            field=f"sampling.{name}",
            numbers={"items": tokens, "limit": MAX_NAMED_TOKENS},
        )
