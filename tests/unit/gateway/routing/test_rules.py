"""Routing rules: what is written is what is meant, the first that fits counts, and a slip is named."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.rules import COMPARISONS, LENGTHS, NO_RULE, Rule, RuleBound, RuleInput, choose, parse
from slipstream.client.gateway_endpoint import KEY_NAME
from slipstream.errors import InvalidArgument

KNOWN = ("model", "ngram", "suffix", "far-away.2")
words = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S"), exclude_characters=":;"), min_size=1)
labels = words.filter(lambda word: len(word) <= 64)
lengths = st.integers(0, 10**9 - 1)
bounds = st.builds(RuleBound, st.sampled_from(LENGTHS), st.sampled_from(sorted(COMPARISONS)), lengths)
conditions = {
    "key": st.none() | st.from_regex(KEY_NAME, fullmatch=True),
    "workload": st.none() | labels,
    "salt": st.none() | labels,
    "bounds": st.lists(bounds, max_size=3).map(tuple),
}
names = st.lists(st.sampled_from(KNOWN), max_size=3).map(tuple)
rules = st.builds(Rule, **conditions, off=st.just(True)) | st.builds(
    Rule, **conditions, drafters=names, max_draft_tokens=st.none() | st.integers(1, 64)
).filter(lambda rule: bool(rule.drafters or rule.max_draft_tokens))


@given(st.lists(rules, max_size=4), st.sampled_from([";", "; ", " ;\n", ";;"]))
def test_printing_and_parsing_are_inverse(some: list[Rule], between: str) -> None:
    assert parse(between.join(map(str, some)), KNOWN) == tuple(some)


@given(st.text("dworklaf=:;<> +n1_ 0m", max_size=30))
def test_no_text_does_anything_but_parse_or_be_refused_with_its_rules_number(text: str) -> None:
    try:
        parsed = parse(text, KNOWN)
    except InvalidArgument as error:
        assert error.message.startswith("GATEWAY_RULES, rule ") and error.message.endswith(".")
    else:
        assert parse(";".join(map(str, parsed)), KNOWN) == parsed


def test_the_documented_example_of_rules_chooses_as_described() -> None:
    parsed = parse(
        "max_tokens<16: off; workload=chat prompt_tokens>=4096: drafters=ngram+suffix; any: max_draft_tokens=4", KNOWN
    )
    assert choose(parsed, RuleInput("chat", "", 15, 5000)).off
    assert choose(parsed, RuleInput("chat", "", 16, 4096)).drafters == ("ngram", "suffix")
    assert choose(parsed, RuleInput("chat", "", 16, 4095)).max_draft_tokens == 4
    assert choose(parsed, RuleInput("", "", 16, 4096)).max_draft_tokens == 4
    assert choose(parsed[:2], RuleInput("", "", 16, 4096)) is NO_RULE


def test_salts_name_tenants_and_an_empty_label_is_no_word() -> None:
    (rule,) = parse("salt=acme workload=code: off", KNOWN)
    assert rule.fits(RuleInput("code", "acme", 1, 1))
    for case in (RuleInput("code", "", 1, 1), RuleInput("", "acme", 1, 1), RuleInput("code", "acme2", 1, 1)):
        assert not rule.fits(case)


def test_a_rule_for_a_key_applies_to_its_requests_alone_whatever_labels_they_have() -> None:
    parsed = parse("key=acme max_tokens<16: off; key=acme: drafters=suffix; any: max_draft_tokens=4", KNOWN)
    assert choose(parsed, RuleInput("", "", 15, 1, "acme")).off
    assert choose(parsed, RuleInput("", "", 16, 1, "acme")).drafters == ("suffix",)
    for other in (RuleInput("", "", 15, 1, "acme2"), RuleInput("acme", "acme", 15, 1)):
        assert choose(parsed, other).max_draft_tokens == 4


@pytest.mark.parametrize("sign", COMPARISONS)
def test_lengths_are_compared_as_written(sign: str) -> None:
    (rule,) = parse(f"max_tokens{sign}2: off", KNOWN)
    for length, other in itertools.product(range(4), range(4)):
        python = {"=": "=="}.get(sign, sign)
        assert rule.fits(RuleInput("", "", length, other)) == eval(f"{length} {python} 2")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("max_tokens<16 off", "colon"),
        (": off", "any"),
        ("any workload=x: off", "any"),
        ("max_token<16: off", "'max_token<16'"),
        ("max_tokens<many: off", "'many'"),
        ("max_tokens<-1: off", "'-1'"),
        ("max_tokens < 16: off", "'max_tokens'"),
        ("workload<x: off", "'workload<x'"),
        ("workload=a workload=b: off", "twice"),
        (f"workload={'x' * 65}: off", "64 bytes"),
        ("any: drafters=model+nobody", "'nobody'"),
        ("key=a+b: off", "no key's name"),
        ("key=a key=b: off", "twice"),
        ("any: drafters=", "'drafters='"),
        ("any: max_draft_tokens=0", "off"),
        ("any: max_draft_tokens<4", "'max_draft_tokens<4'"),
        ("any: off drafters=model", "'off'"),
        ("any: drafters=model drafters=ngram", "twice"),
        ("any:", "actions"),
        ("workload=a:b: off", "'b:'"),
    ],
)
def test_a_mistake_in_a_rule_is_reported_with_its_number(text: str, wrong: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(f"any: off; {text}", KNOWN)
    assert caught.value.message.startswith("GATEWAY_RULES, rule 2 (")
    assert wrong in caught.value.message
