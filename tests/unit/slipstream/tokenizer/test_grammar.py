"""Structured output: masks are functions of the tokens before them, and what they let through is the language."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, models

from slipstream.errors import GRAMMAR_TOO_COSTLY, FailedPrecondition, InvalidArgument, SlipstreamError
from slipstream.rpc import proto_conversion
from slipstream.tokenizer.grammar import KEPT, Cursor, Grammar, Grammars, MaskBudget, allows, mask_bytes
from slipstream.tokenizer.structured_output import (
    FORMATS_OF_STRINGS,
    MAX_BYTES,
    OPTIONS_KEY,
    StructuredOutput,
    choice_grammar,
    whitespace_options,
)
from slipstream.tokenizer.vocabulary import fingerprint
from slipstream.v1 import types_pb2
from tests.support.grammars import (
    AMBIGUOUS,
    END,
    LANGUAGES,
    VOCABULARY,
    allowed,
    compiled,
    grammars,
    place,
    spelled,
    tokenizer,
)
from verifier_svc.grammar.token_constraint import ReasoningBound, TokenConstraint, TokenRules

NAMES = st.sampled_from(sorted(LANGUAGES))


def walk(cursor: Cursor, rng: random.Random, most: int = 120) -> list[int]:
    """A text drawn from the masks, its end included."""
    tokens: list[int] = []
    while len(tokens) < most and END not in tokens:
        choice = allowed(cursor.mask(tokens))
        assert choice
        tokens.append(END if END in choice and rng.random() < 0.3 else rng.choice(choice))
    return tokens


@pytest.mark.parametrize("vocabulary", [VOCABULARY, VOCABULARY + 1, VOCABULARY + 8, 49_152])
def test_masks_of_grammars_and_of_token_rules_have_one_size(vocabulary: int) -> None:
    """A step computes those of all its sessions together. Models have more logits than their tokenizers have tokens."""
    known = LLTokenizer(tokenizer().to_str(), n_vocab=vocabulary, eos_token=[END])
    grammar = Grammar(known, LLMatcher.grammar_from_regex("[a-z]+"), [END]).cursor().mask([])
    rules = TokenRules(vocabulary, min_length=9, stop_token_ids=[END], reasoning=ReasoningBound(2, 5, 6))
    barred = TokenConstraint(rules, [7], 1, drawn=False).after(())
    ended = TokenConstraint(rules, [7], 1, drawn=False).after((5, 7, 7))
    assert grammar is not None and barred is not None and ended is not None
    assert {mask.shape for mask in (grammar, barred, ended)} == {(mask_bytes(vocabulary),)}
    assert allowed(ended) == [6] and END not in allowed(barred)


@settings(deadline=None, max_examples=60)
@given(NAMES, st.integers(0, 10**6))
def test_an_output_may_end_exactly_where_it_belongs_to_the_language(name: str, seed: int) -> None:
    language = LANGUAGES[name]
    cursor, fresh = place(language.structure), place(language.structure)
    tokens = walk(cursor, random.Random(seed))
    for length in range(len(tokens)):
        ends = END in allowed(fresh.mask(tokens[:length]))
        assert ends == language.holds(spelled(tokens[:length])), spelled(tokens[:length])


@settings(deadline=None, max_examples=40)
@given(NAMES, st.integers(0, 10**6))
def test_a_mask_does_not_depend_on_the_way_to_its_place(name: str, seed: int) -> None:
    rng = random.Random(seed)
    structure = LANGUAGES[name].structure
    texts = [walk(place(structure), rng, 20) for _ in range(3)]
    places = [text[: rng.randint(0, len(text))] for text in texts for _ in range(4)]
    wandering = place(structure)
    for tokens in places:
        here, there = wandering.mask(tokens), place(structure).mask(tokens)
        assert (here is None) == (there is None) == (END in tokens)
        assert here is None or there is None or bytes(here) == bytes(there)


def test_a_mask_is_computed_once_for_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = place(LANGUAGES["words"].structure)
    first = cursor.mask([])
    assert cursor.mask([]) is first
    assert cursor.mask(tokenizer().encode("foo").ids) is not first


def test_behind_the_end_nothing_counts_and_nothing_is_allowed() -> None:
    cursor = place(StructuredOutput("regex", "a?"))
    assert cursor.mask([END, 5]) is None
    assert not allows(cursor.mask([END]), END)
    assert allows(cursor.mask([]), END)


def test_a_cursor_that_cannot_follow_a_text_raises_and_can_be_used_again() -> None:
    cursor = place(StructuredOutput("regex", "[ab]c"))
    a, x = (tokenizer().encode(word).ids for word in "ax")
    for _ in range(2):
        with pytest.raises(FailedPrecondition, match="cannot be followed") as caught:
            cursor.mask([*a, *x])
        assert caught.value.reason == "GRAMMAR_GAVE_UP"
    assert allowed(cursor.mask(a)) == allowed(place(StructuredOutput("regex", "[ab]c")).mask(a)) != []


class Panic(BaseException):
    """As pyo3's PanicException, no Exception."""


class Panicking:
    """A matcher that panics after it took some of the tokens."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def consume_tokens(self, tokens: list[int]) -> None:
        self._matcher.consume_tokens(tokens[:1])
        raise Panic


def test_a_cursor_is_consistent_after_its_library_panicked_halfway() -> None:
    cursor, fresh = place(StructuredOutput("regex", "[ab]+c")), place(StructuredOutput("regex", "[ab]+c"))
    text = [*tokenizer().encode("a").ids, *tokenizer().encode("b").ids]
    cursor._matcher = Panicking(cursor._matcher)  # type: ignore[assignment]
    with pytest.raises(Panic):
        cursor.mask(text)
    assert allowed(cursor.mask([])) == allowed(fresh.mask([]))
    assert allowed(cursor.mask(text)) == allowed(fresh.mask(text))


def test_a_cursor_with_little_time_gives_up_early_and_computes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a drafter's, which then proposes without the grammar."""
    cursor, (a,) = compiled(AMBIGUOUS).cursor(MaskBudget(0.001, 0.05)), tokenizer().encode("a").ids
    text: list[int] = []
    with pytest.raises(FailedPrecondition) as caught:
        while len(text) < 250:
            cursor.mask(text)
            text.append(a)
    assert caught.value.reason == GRAMMAR_TOO_COSTLY and len(text) > 10
    monkeypatch.setattr(cursor, "_matcher", None)
    with pytest.raises(FailedPrecondition):
        cursor.mask([])


@settings(deadline=None, max_examples=60)
@given(NAMES, st.integers(0, 10**6), st.booleans())
def test_commits_and_paths_lead_to_the_same_masks(name: str, seed: int, costly: bool) -> None:
    """`costly`: the library moves on its own threads."""
    rng, structure, budget = random.Random(seed), LANGUAGES[name].structure, MaskBudget()
    text, fresh, cursor = walk(place(structure), rng, 30), place(structure), compiled(structure).cursor(budget)
    done = 0
    for _ in range(12):
        budget.last_s = 1.0 if costly else 0.0
        path = text[done : done + rng.randint(0, 6)]
        if len(path) > 1 and rng.random() < 0.3:
            path[-1] = rng.choice(allowed(fresh.mask(text[: done + len(path) - 1])))
        here, there = cursor.mask(path), fresh.mask([*text[:done], *path])
        assert (here is None) == (there is None) and (here is None or bytes(here) == bytes(there))
        step = rng.randint(0, 3)
        cursor.commit(text[done : done + step])
        done = min(len(text), done + step)


def test_where_one_text_can_follow_the_mask_is_the_tokenizers_own_next_token() -> None:
    text = "return the quick brown fox"
    structure, ids = StructuredOutput("regex", text), tokenizer().encode(text).ids
    cursor = place(structure)
    assert [allowed(cursor.mask(ids[:length])) for length in range(len(ids) + 1)] == [[each] for each in [*ids, END]]


# Admission.

BAD = {
    "regex": ["(a", "a{2", "(?=a)b", r"(a)\1", "[z-a]", "a**" + "*" * 5000, "(" * 30_000 + ")" * 30_000],
    "grammar": [
        "",
        "start: foo",
        "nonsense",
        'start: "a',
        "start: /(/",
        "start: " + "(" * 9000,
        '{"grammars": []}',
        'root ::= "a"',
    ],
    "json_schema": [
        *("", "{", "3", "[1]", '""', "[" * 30_000, '{"a":' * 9000),
        *('{"type": 3}', '{"$ref": "#/nope"}', '{"$ref": "http://x.example/y"}', '{"not": {}}'),
        *('{"uniqueItems": true}', '{"type": "string", "pattern": "("}'),
    ],
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in BAD.items() for text in texts])
def test_unreadable_grammars_are_refused_with_a_sentence(kind: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        compiled(StructuredOutput(kind, text))
    assert caught.value.reason == "BAD_GRAMMAR"
    assert 20 < len(caught.value.message) < 600 and "\n" not in caught.value.message


def spells(structure: StructuredOutput, text: str) -> bool:
    """Whether the output may be exactly this text."""
    cursor = compiled(structure).cursor()
    tokens = tokenizer().encode(text, add_special_tokens=False).ids
    places = [*tokens, END]
    return all(allows(cursor.mask(tokens[:at]), token) for at, token in enumerate(places))


PERSON: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("structure", "inside", "outside"),
    [
        (
            StructuredOutput("json_object"),
            ["{}", '{"a": 1, "b": [2, 3]}'],
            ['{"a":1}', '{ "a": 1}', '{"a": 1}\n', " {}"],
        ),
        (StructuredOutput("json_schema", json.dumps(PERSON)), ['{"a": 1}'], ['{"a":1}', '{\n"a": 1}', "{}"]),
        (
            StructuredOutput("json_schema", json.dumps(PERSON | {OPTIONS_KEY: whitespace_options(r"[ \n]{0,2}")})),
            ['{"a": 1}', '{"a":1}', '{\n "a" :1}'],
            ['{\n  "a": 1}', '{\t"a": 1}'],
        ),
        (
            StructuredOutput("grammar", choice_grammar(["ja", 'a "b"\n', "是"])),
            ["ja", 'a "b"\n', "是"],
            ["jaja", "j", ""],
        ),
    ],
)
def test_json_has_the_spaces_of_json_dumps_unless_its_schema_sets_others(
    structure: StructuredOutput, inside: list[str], outside: list[str]
) -> None:
    assert [text for text in inside if not spells(structure, text)] == []
    assert [text for text in outside if spells(structure, text)] == []


def test_formats_that_nothing_constrains_are_annotations_and_names_and_values_are_not_formats() -> None:
    """As pydantic writes `Path`, `bytes` and `IPvAnyAddress`; uniqueItems is refused by name."""
    for name in ("path", "binary", "ipvanyaddress"):
        assert spells(StructuredOutput("json_schema", json.dumps({"type": "string", "format": name})), '"/x"')
    for name in FORMATS_OF_STRINGS:
        assert not spells(StructuredOutput("json_schema", json.dumps({"type": "string", "format": name})), '"/\u00e9"')
    schema = {"type": "object", "properties": {"format": {"enum": [{"format": "path"}]}}, "required": ["format"]}
    assert spells(StructuredOutput("json_schema", json.dumps(schema)), '{"format": {"format": "path"}}')
    with pytest.raises(InvalidArgument, match="uniqueItems"):
        compiled(StructuredOutput("json_schema", '{"uniqueItems": true}'))


@pytest.mark.parametrize(
    ("names", "inside", "outside"),
    [
        ({"type": "string", "title": "Name"}, ['{"a": 1, "x": 2}', "{}"], ['{"a": "b"}']),
        ({"type": "string", "enum": ["a", "b"]}, ['{"a": 1, "b": 2}', '{"b": 2}', "{}"], ['{"c": 1}', '{"a": ""}']),
        ({"$ref": "#/$defs/E"}, ['{"a": 1}', "{}"], ['{"c": 1}']),
        ({"type": "string", "pattern": "^x[0-9]$"}, ['{"x1": 1, "x2": 2}', "{}"], ['{"y1": 1}', '{"x1": ""}']),
    ],
)
def test_names_of_properties_are_constrained_by_property_names(
    names: dict[str, Any], inside: list[str], outside: list[str]
) -> None:
    """As zod writes `z.record`, and pydantic a dict whose keys are an enumeration's."""
    schema = {"propertyNames": names, "type": "object", "additionalProperties": {"type": "integer"}}
    structure = StructuredOutput("json_schema", json.dumps({"$defs": {"E": {"enum": ["a", 2]}}, **schema}))
    assert [text for text in inside if not spells(structure, text)] == []
    assert [text for text in outside if spells(structure, text)] == []


@pytest.mark.parametrize(
    "names",
    [{"minLength": 2}, {"$ref": "#/nowhere"}, {"type": "integer"}, {"enum": "ab"}, {"pattern": "^a", "enum": []}, 3],
)
def test_unsupported_schemas_of_property_names_are_refused_by_the_key(names: Any) -> None:
    with pytest.raises(InvalidArgument, match="propertyNames"):
        compiled(StructuredOutput("json_schema", json.dumps({"type": "object", "propertyNames": names})))


def test_a_property_may_be_called_property_names() -> None:
    schema = {"type": "object", "properties": {"propertyNames": {"type": "integer"}}, "required": ["propertyNames"]}
    assert spells(StructuredOutput("json_schema", json.dumps(schema)), '{"propertyNames": 1}')


def test_a_grammar_that_no_text_satisfies_is_refused() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        compiled(StructuredOutput("regex", r"[^\s\S]"))
    assert caught.value.reason == "UNSATISFIABLE_GRAMMAR"


@pytest.mark.parametrize("text", ["false", '{"enum": []}', '{"type": "string", "minLength": 5, "maxLength": 2}'])
def test_a_schema_without_any_value_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="Unsatisfiable"):
        compiled(StructuredOutput("json_schema", text))


def test_a_structure_has_a_largest_size_and_a_known_format() -> None:
    StructuredOutput("regex", "é" * (MAX_BYTES // 2))
    with pytest.raises(InvalidArgument) as caught:
        StructuredOutput("regex", "é" * (MAX_BYTES // 2) + "a")
    assert caught.value.reason == "GRAMMAR_TOO_LONG"
    with pytest.raises(InvalidArgument, match="choose one of"):
        StructuredOutput("xml", "")


def nested_rules(name: str) -> StructuredOutput:
    """As many rules as find room, each of which names the next."""
    rules = [f"start: {name}0"]
    size = len(rules[0])
    while size < MAX_BYTES - 40:
        rules.append(f"{name}{len(rules) - 1}: {name}{len(rules)}")
        size += 1 + len(rules[-1])
    rules.append(f'{name}{len(rules) - 1}: "x"')
    return StructuredOutput("grammar", "\n".join(rules))


@pytest.mark.parametrize("name", ["a", "A"])
def test_as_many_rules_as_find_room_end_no_process(name: str) -> None:
    """The library recurses along rules that name rules: on a usual stack this would be the end of the test run."""
    assert allowed(compiled(nested_rules(name)).cursor().mask([])) == tokenizer().encode("x").ids


@settings(deadline=None, max_examples=120)
@given(
    st.sampled_from(["regex", "grammar", "json_schema"]),
    st.text(st.sampled_from('ab01(){}[]|*+?.,:;"\\/^$&~%@<> \n_-é'), max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "properties", "items", "anyOf", "$ref", "enum", "pattern", "required", "a"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    ).map(json.dumps),
)
def test_anything_is_compiled_or_refused_with_a_type(kind: str, text: str) -> None:
    try:
        cursor = compiled(StructuredOutput(kind, text)).cursor()
    except (InvalidArgument, FailedPrecondition) as error:
        assert error.reason in ("BAD_GRAMMAR", "UNSATISFIABLE_GRAMMAR")
    else:
        assert allowed(cursor.mask([]))


# For whom a grammar is compiled.


def refused(grammars: Grammars) -> SlipstreamError:
    failure = grammars.compile(StructuredOutput("json_object")).exception()
    assert isinstance(failure, SlipstreamError)
    return failure


def test_a_model_without_words_or_without_an_end_cannot_be_constrained() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))

    def never() -> Tokenizer:
        raise AssertionError("an emulated model has no tokenizer to load")

    for unfit in (
        Grammars(never, "emulated-256", 256, (0,)),
        Grammars(tokenizer, "another fingerprint", 4096, (0,)),
        Grammars(tokenizer, fingerprint(tokenizer()), 4096, ()),
        Grammars(lambda: words, fingerprint(words), 2, (0,)),
    ):
        failure = refused(unfit)
        assert isinstance(failure, FailedPrecondition) and failure.reason == "NO_TOKENIZER"


def test_columns_beyond_the_tokenizer_are_never_allowed() -> None:
    padded = Grammars(tokenizer, fingerprint(tokenizer()), 4100, (END, 1))
    mask = padded.compile(StructuredOutput("regex", "(.|\n)*")).result().cursor().mask([])
    assert mask is not None and len(mask) * 8 >= 4100
    choice = [token for token in range(4100) if mask[token >> 3] >> (token & 7) & 1]
    assert max(choice) < 4096 and {END, 1} <= set(choice)


def test_the_same_grammar_is_compiled_once_for_each_salt() -> None:
    structure = StructuredOutput("regex", "once")

    def of(salt: str) -> Future[Grammar]:
        return grammars().compile(structure, salt)

    assert of("one").result() is of("one").result() is not of("other").result()


def test_one_tenant_s_large_grammars_delay_no_other_tenant_s() -> None:
    """Compiled one after another, the small one would come last."""
    large = [nested_rules(f"r{number}") for number in range(12)]
    compiling = [grammars().compile(structure, "a", "theirs") for structure in large]
    assert isinstance(grammars().compile(StructuredOutput("regex", "small"), "b", "mine").result(), Grammar)
    assert not compiling[-1].done()
    for future in compiling:
        future.cancel()


STRUCTURES = [StructuredOutput("json_object"), *(language.structure for language in LANGUAGES.values())]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda each: each.format)
def test_a_structure_survives_the_wire(structure: StructuredOutput) -> None:
    message = proto_conversion.structure_to_proto(structure)
    assert message is not None
    assert (
        proto_conversion.structure_from_proto(types_pb2.StructuredOutput.FromString(message.SerializeToString()))
        == structure
    )


def test_no_structure_survives_the_wire_and_json_object_false_is_refused() -> None:
    assert proto_conversion.structure_to_proto(None) is None
    assert proto_conversion.structure_from_proto(types_pb2.StructuredOutput()) is None
    with pytest.raises(InvalidArgument, match="json_object"):
        proto_conversion.structure_from_proto(types_pb2.StructuredOutput(json_object=False))


def test_a_tenant_with_many_grammars_takes_none_of_another_s_out_of_the_cache() -> None:
    known = Grammars(tokenizer, fingerprint(tokenizer()), VOCABULARY, (END,))

    def compile_for(tenant: str, number: int) -> Grammar:
        return known.compile(StructuredOutput("regex", f"x{{{number}}}"), tenant, tenant).result()

    mine = [compile_for("me", number) for number in range(1, 4)]
    for number in range(1, KEPT + 20):
        compile_for("another", number)
    assert [compile_for("me", number) for number in range(1, 4)] == mine
