"""Requests of every kind, drawn at random: samplings, bounds, stops, log-probabilities and drafters in any mix.

What one session asks for meets what others ask for in the steps of the verifier, which computes masks, penalties and
log-probabilities of all of them together.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from slipstream.v1 import gateway_pb2, types_pb2
from tests.real_model.prompts import OWN

VOCABULARY = 49_152
OTHERS = (
    "日本の首都はどこですか。日本語で答えてください。",
    "Write ten emoji in a row and repeat them: 😀😁😂🤣😃",
    "Les élèves français étudient à l'école où naît l'été.",
    " ".join(f"Entry {number}: item {number} costs {number * 7919 % 1000}." for number in range(60)) + " Repeat them.",
    "def read(self, path):\n    with open(path) as file:\n",
    "x",
)
SCHEMAS = (
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "price": {"type": "integer", "maximum": 999}},
        "required": ["name", "price"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 3, "maxItems": 12},
    {"anyOf": [{"type": "string", "pattern": "^[a-c]{3,8}$"}, {"type": "object", "properties": {"k": {"const": "v"}}}]},
)
PATTERNS = ("(yes|no|maybe)( (yes|no|maybe)){0,20}", r"[0-9]{1,3}(\.[0-9]{1,3}){3}", "[a-zäöü ]{10,60}", "(a|b)*c")
GRAMMAR = 'start: term (("+"|"-") term)*\nterm: /[0-9]{1,3}/ | "(" start ")"'
STOPS = ("the", "\n", ".", " of", "1", ", ", "ing ", "é", "、", "def", "The capital", "😀", '"', "}")
BAD_WORDS = ("the", " the", "is", "Paris", " and", "moon", "def", "I")


def mixed_request(chance: random.Random) -> gateway_pb2.GenerateRequest:
    """With speculation as the server chooses it."""
    asked = gateway_pb2.GenerateRequest(sampling=_sampling(chance), max_tokens=chance.choice([1, 2, 5, 17, 32, 48]))
    text, kind = chance.choice([*OWN, *OTHERS]), chance.random()
    if kind < 0.6:
        asked.chat.messages.add(role="user", content=text)
    elif kind < 0.9:
        asked.prompt = text
    else:
        asked.prompt_token_ids.token_ids.extend(_tokens(chance, chance.choice([1, 7, 130, 300])))
    if chance.random() < 0.3:
        asked.structured_output.CopyFrom(_structure(chance))
    else:
        _add_bounds(asked, chance)
    if chance.random() < 0.3:
        asked.stop.extend(chance.sample(STOPS, chance.choice([1, 2, 5])))
    if chance.random() < 0.15:
        asked.stop_token_ids.extend(_tokens(chance, 5))
    if chance.random() < 0.5:
        asked.logprobs, asked.top_logprobs = True, chance.choice([0, 1, 3, 20])
    if chance.random() < 0.15:
        asked.prompt_logprobs = chance.choice([0, 1, 5])
    asked.include_stop, asked.show_special_tokens = chance.random() < 0.2, chance.random() < 0.2
    asked.stream_interval = chance.choice([0, 0, 2, 7])
    asked.cache_salt, asked.priority = chance.choice(["", "", "a", "b"]), chance.choice([0, 0, 0, 1, 5])
    return asked


def plainly(asked: gateway_pb2.GenerateRequest) -> gateway_pb2.GenerateRequest:
    """The same without speculation."""
    plain = gateway_pb2.GenerateRequest()
    plain.CopyFrom(asked)
    plain.speculation.disabled = True
    return plain


def speculating(
    asked: gateway_pb2.GenerateRequest, text: Sequence[int], drafters: Sequence[str], chance: random.Random
) -> gateway_pb2.GenerateRequest:
    """The same with some of the drafters, tree sizes, another place in the cache, and `text` or something like it as
    what the client expects."""
    drafted = gateway_pb2.GenerateRequest()
    drafted.CopyFrom(asked)
    drafted.speculation.drafters.extend(chance.sample(drafters, chance.choice([1, 1, 2, len(drafters)])))
    if chance.random() < 0.5:
        drafted.speculation.max_draft_tokens = chance.choice([1, 2, 8, 64])
    drafted.speculation.rounds = chance.random() < 0.5
    drafted.cache_salt, drafted.priority = chance.choice(["", asked.cache_salt]), chance.choice([0, 1])
    if "prediction" in drafted.speculation.drafters:
        guess = list(text) or [0]
        for place in chance.sample(range(len(guess)), len(guess) // 8):
            guess[place] = chance.randrange(VOCABULARY)
        drafted.prediction.token_ids.token_ids.extend(guess)
    return drafted


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(count)]


def _sampling(chance: random.Random) -> types_pb2.SamplingOptions:
    """Each option at its default more often than not; extreme values too."""
    asked = types_pb2.SamplingOptions(seed=chance.choice([0, 7, 2**64 - 1, chance.getrandbits(64)]))
    asked.temperature = chance.choice([0.0, 0.0, 0.7, 0.7, 1.0, 1.5, 1e-38, 100.0])
    if chance.random() < 0.1:
        asked.acceptance = chance.choice([types_pb2.ACCEPTANCE_RULE_REJECTION, types_pb2.ACCEPTANCE_RULE_TYPICAL])
    for name, values in (
        ("top_k", (1, 5, 50, 100_000)),
        ("top_p", (1e-9, 0.5, 0.9, 0.999)),
        ("min_p", (1.0, 0.5, 0.05, 1e-6)),
        ("repetition_penalty", (1.3, 0.8, 100.0)),
        ("presence_penalty", (-2, 0.5, 2)),
        ("frequency_penalty", (-2, 0.5, 2)),
    ):
        if chance.random() < 0.25:
            setattr(asked, name, chance.choice(values))
    if chance.random() < 0.25:
        for token in _tokens(chance, chance.choice([1, 40])):
            asked.logit_bias[token] = chance.choice([-100, -1, 1, 5])
    return asked


def _structure(chance: random.Random) -> types_pb2.StructuredOutput:
    return chance.choice(
        [
            types_pb2.StructuredOutput(json_schema=json.dumps(chance.choice(SCHEMAS))),
            types_pb2.StructuredOutput(regex=chance.choice(PATTERNS)),
            types_pb2.StructuredOutput(grammar=GRAMMAR),
            types_pb2.StructuredOutput(json_object=True),
        ]
    )


def _add_bounds(asked: gateway_pb2.GenerateRequest, chance: random.Random) -> None:
    asked.ignore_eos = chance.random() < 0.2
    if chance.random() < 0.25:
        asked.min_tokens = chance.randint(1, asked.max_tokens)
    if chance.random() < 0.25:
        asked.bad_words.extend(chance.sample(BAD_WORDS, 4))
        asked.sampling.bad_words_ids.add(token_ids=_tokens(chance, 2))
    if chance.random() < 0.1:
        asked.sampling.allowed_token_ids.extend({0, 2, *_tokens(chance, 200)})
    if chance.random() < 0.15:
        marks = chance.choice([(1, 2), (28, 30), (260, 198)])
        asked.reasoning_limit.max_tokens = chance.choice([0, 1, 4, 20])
        asked.reasoning_limit.begin_token_id, asked.reasoning_limit.end_token_id = marks
