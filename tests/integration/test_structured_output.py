"""Structured output through real services with the shipped pair in fp32: the same text whatever is drafted, of the
language that was asked for, and no forbidden candidate is ever verified.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipstream.engine.engine import Engine
from slipstream.engine.factory import open_engine
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.grammar import Grammar, Grammars, allows
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import drafter_pb2, types_pb2, verifier_pb2
from tests.support.fleet import (
    Decoded,
    Gateway,
    VerifierServer,
    drafter,
    gateway,
    in_time,
    opening,
    slowed,
    until,
    verifier,
)
from tests.support.grammars import AMBIGUOUS, END, LANGUAGES, TARGET, compiled, grammars, place, spelled, tokenizer
from tests.support.hostile_drafter import Command, HostileDrafter, frame, hostile
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.executor import ScheduledSequence, StepOutcome
from verifier_svc.grammar.compilation import MOST_HELD

DRAFT = str(Path(TARGET).parent / "draft")
PROMPT = tokenizer().encode("def read(self, path):").ids
TOKENS = 48
STOP = verifier_pb2.FINISH_REASON_STOP
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.8, seed=5, top_k=40, top_p=0.9, repetition_penalty=1.2, logit_bias={END: 5.0}),
]


@pytest.fixture(scope="module")
def target() -> Engine:
    return slowed(open_engine(TARGET, "float32", 8192), 0.01)


@pytest.fixture
async def server(target: Engine) -> AsyncIterator[VerifierServer]:
    async with verifier(target, model=TARGET) as server:
        yield server


@pytest.fixture
async def client(server: VerifierServer) -> AsyncIterator[Gateway]:
    async with gateway(server.address) as client:
        yield client


@pytest.fixture(scope="module")
def drafts() -> tuple[Engine, Engine]:
    """One engine for each drafter."""
    return open_engine(DRAFT, "float32", 8192), open_engine(DRAFT, "float32", 8192)


@pytest.fixture
async def knowing(drafts: tuple[Engine, Engine]) -> AsyncIterator[str]:
    """A drafter that guesses inside the grammar."""
    async with drafter(drafts[0], grammars=grammars()) as address:
        yield address


@pytest.fixture
async def unknowing(drafts: tuple[Engine, Engine]) -> AsyncIterator[str]:
    """One that knows of no grammar."""
    async with drafter(drafts[1]) as address:
        yield address


async def decode(client: Gateway, structure: StructuredOutput, **options: Any) -> Decoded:
    return await client.decode(PROMPT, **({"tokens": TOKENS, "stop": [END], "structure": structure} | options))


async def ended(decoded: Decoded) -> tuple[grpc.StatusCode, str]:
    await until(decoded.done.is_set)
    assert decoded.end is not None
    code = next(code for code in grpc.StatusCode if code.value[0] == decoded.end.failure.code)
    return code, decoded.end.failure.reason


Seen = list[tuple[list[int], list[tuple[int, ...]]]]


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Of every scheduled sequence the output before it, and the paths of its candidates."""
    seen: Seen = []

    execute = EmbeddedExecutor.execute

    def watched(executor: EmbeddedExecutor, step: list[ScheduledSequence]) -> list[StepOutcome]:
        for scheduled in step:
            paths = [scheduled.selection.path(node) for node in range(len(scheduled.selection))]
            seen.append((scheduled.session.tokens[scheduled.session.request.prompt_length :], paths))
        return execute(executor, step)

    monkeypatch.setattr(EmbeddedExecutor, "execute", watched)
    yield seen


def all_fit(structure: StructuredOutput, seen: Seen) -> int:
    """How many candidates were verified, none of which is forbidden."""
    cursor = place(structure)
    for output, paths in seen:
        for path in paths:
            assert allows(cursor.mask([*output, *path[:-1]]), path[-1])
    return sum(len(paths) for _, paths in seen)


def careless(rng: random.Random) -> Any:
    """Tells of every commit some tokens at random, and chains of brackets and letters, which sometimes fit."""

    def answer(drafter: HostileDrafter, command: Command) -> list[drafter_pb2.DraftResponse]:
        if command.WhichOneof("command") not in ("open", "commit"):
            return []
        likely = tokenizer().encode(rng.choice(['{"name":"', "foobar", "return self", "(1+2", "fox", "a b c"])).ids
        return [frame(command, [*likely[rng.randint(0, 2) :], rng.randrange(1, 4096)])]

    return answer


@pytest.mark.parametrize("name", sorted(LANGUAGES))
async def test_speculation_changes_no_token_and_the_text_is_of_the_language(
    client: Gateway, knowing: str, unknowing: str, verified: Seen, name: str
) -> None:
    language = LANGUAGES[name]

    async def texts(drafters: list[str]) -> list[Decoded]:
        runs = (decode(client, language.structure, sampling=one, drafters=drafters) for one in SAMPLINGS)
        return await asyncio.gather(*runs)

    plain = await texts([])
    for decoded in plain:
        assert END not in decoded.token_ids[:-1]
        if decoded.end is not None and decoded.end.reason == STOP:
            assert decoded.token_ids[-1] == END and language.holds(spelled(decoded.token_ids))
    verified.clear()
    async with hostile(careless(random.Random(name))) as enemy:
        crews = ([knowing], [unknowing], [enemy.address], [unknowing, enemy.address])
        for said in await asyncio.gather(*map(texts, crews)):
            for decoded, expected in zip(said, plain, strict=True):
                assert decoded.token_ids == expected.token_ids
                assert decoded.end is not None and expected.end is not None
                assert decoded.end.reason == expected.end.reason
    assert all_fit(language.structure, verified) > 0


async def test_a_drafter_that_uses_the_grammar_has_more_candidates_accepted(
    client: Gateway, knowing: str, unknowing: str
) -> None:
    structure = LANGUAGES["schema"].structure

    async def accepted(address: str) -> int:
        runs = (decode(client, structure, sampling=SamplingParams(seed=seed), drafters=[address]) for seed in range(4))
        return sum(decoded.accepted for decoded in await asyncio.gather(*runs))

    async def better() -> bool:
        return await accepted(knowing) > 1.5 * await accepted(unknowing)

    assert await in_time(better)


async def test_under_a_ratio_rule_the_text_is_of_the_language_too(
    client: Gateway, knowing: str, unknowing: str
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, acceptance="rejection", logit_bias={END: 8.0})

    async def accepted(name: str, address: str) -> int:
        language, options = LANGUAGES[name], {"drafters": [address], "trusted": True, "tokens": 100}
        decoded = await decode(client, language.structure, sampling=sampling, **options)
        assert not any(event.HasField("failure") for event in decoded.events)
        assert decoded.end is not None and not decoded.end.HasField("failure")
        assert decoded.end.reason != STOP or language.holds(spelled(decoded.token_ids))
        return decoded.accepted

    names, addresses = ("words", "schema", "sum"), (knowing, unknowing)
    assert sum(await asyncio.gather(*(accepted(name, each) for name in names for each in addresses))) > 0


async def test_all_kinds_of_bounds_meet_in_one_step(server: VerifierServer, client: Gateway, knowing: str) -> None:
    """Grammars, a least length, a limit of reasoning and no bounds: each text is the one that it is alone."""
    [first, second, *_] = tokenizer().encode("<think> </think>").ids
    limit = types_pb2.ReasoningLimit(max_tokens=3, begin_token_id=first, end_token_id=second)
    asked: list[dict[str, Any]] = [
        {"structure": LANGUAGES["schema"].structure, "stop": [END]},
        {"structure": LANGUAGES["sum"].structure, "stop": [END]},
        {"min_length": len(PROMPT) + TOKENS, "stop": list(range(0, 4096, 3))},
        {"reasoning_limit": limit},
        {},
    ]
    alone = [(await client.decode(PROMPT, tokens=TOKENS, **each)).token_ids for each in asked]
    together = await asyncio.gather(
        *(
            client.decode(PROMPT, tokens=TOKENS, drafters=drafters, **each)
            for each in asked
            for drafters in ([], [knowing])
        )
    )
    assert [each.token_ids for each in together] == [text for text in alone for _ in range(2)]
    assert not any(server.scheduler.step_faults.values())


async def test_a_session_goes_on_elsewhere_from_any_place(client: Gateway) -> None:
    structure, sampling = LANGUAGES["schema"].structure, SAMPLINGS[1]
    whole = (await decode(client, structure, sampling=sampling)).token_ids
    assert whole[-1] == END
    cuts = range(1, len(whole), 5)
    rest = await asyncio.gather(*(decode(client, structure, sampling=sampling, output=whole[:cut]) for cut in cuts))
    assert [decoded.token_ids for decoded in rest] == [whole[cut:] for cut in cuts]


async def test_a_preempted_session_has_the_same_text() -> None:
    prompts = [[index, *PROMPT * 6] for index in range(1, 5)]  # that share no KV
    structures = [
        StructuredOutput("regex", f"{letters}{{99,}}") for letters in ("[a-f ]", "(do|re|mi)", "[0-9]", "(é|ü)")
    ]

    async def texts(kv_tokens: int) -> tuple[list[list[int]], int]:
        engine, options = open_engine(TARGET, "float32", kv_tokens), {"sampling": SAMPLINGS[1], "stop": [END]}
        async with verifier(engine, model=TARGET) as server, gateway(server.address) as client:
            runs = (
                client.decode(prompt, tokens=60, structure=structure, **options)
                for prompt, structure in zip(prompts, structures, strict=True)
            )
            said = [decoded.token_ids for decoded in await asyncio.gather(*runs)]
            return said, server.scheduler.kv_admission.preemptions

    (roomy, never), (cramped, often) = await texts(8192), await texts(192)
    assert never == 0 < often
    assert cramped == roomy


# Refusals, and what others notice of them.


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        ({"structure": StructuredOutput("regex", "(a")}, grpc.StatusCode.INVALID_ARGUMENT, "BAD_GRAMMAR"),
        (
            {"structure": StructuredOutput("regex", r"[^\s\S]")},
            grpc.StatusCode.FAILED_PRECONDITION,
            "UNSATISFIABLE_GRAMMAR",
        ),
        (
            {"structure": StructuredOutput("json_object"), "stop": []},
            grpc.StatusCode.INVALID_ARGUMENT,
            "ENDLESS_GRAMMAR",
        ),
        ({"top_logprobs": 21}, grpc.StatusCode.INVALID_ARGUMENT, "NUMBER_OUT_OF_RANGE"),
        (
            {"structure": StructuredOutput("regex", "a+"), "output": tokenizer().encode("zz").ids},
            grpc.StatusCode.FAILED_PRECONDITION,
            "GRAMMAR_GAVE_UP",
        ),
    ],
)
async def test_bad_opens_end_their_session_only(
    client: Gateway, options: dict[str, Any], code: grpc.StatusCode, reason: str
) -> None:
    healthy = (await client.open(PROMPT, tokens=20))[1]
    _, refused = await client.open(PROMPT, **({"stop": [END]} | options))
    assert await ended(refused) == (code, reason)
    assert refused.token_ids == []
    await until(healthy.done.is_set)
    assert len(healthy.token_ids) == 20


async def test_an_emulated_model_has_no_words_to_constrain() -> None:
    async with verifier(open_engine("emulated:"), model="emulated:") as server, gateway(server.address) as client:
        _, refused = await client.open([1, 2], structure=StructuredOutput("json_object"))
        assert await ended(refused) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_TOKENIZER")


async def test_a_grammar_whose_masks_take_long_ends_alone_while_others_go_on(
    server: VerifierServer, client: Gateway, unknowing: str
) -> None:
    """Sessions of an ambiguous grammar, which would take half a second for each mask after 250 tokens, write on and on.
    Others of the same tenant come and end meanwhile, and the verifier is never seen to stand still."""
    wanted = dict.fromkeys(tokenizer().encode("ab").ids, 50.0) | {END: -100.0}
    options = {"structure": AMBIGUOUS, "stop": [END], "tokens": 2000, "drafters": [unknowing]}
    sampling = SamplingParams(temperature=1.0, logit_bias=wanted)
    doomed = [(await client.open(PROMPT, sampling=sampling, **options))[1] for _ in range(2)]
    for name in sorted(LANGUAGES):
        structure = LANGUAGES[name].structure
        both = client.decode(PROMPT, tokens=20), decode(client, structure, sampling=SAMPLINGS[1], tokens=20)
        for decoded in await asyncio.gather(*both):
            assert decoded.end is not None and not decoded.end.HasField("failure")
    for decoded in doomed:
        code, reason = await ended(decoded)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert reason in ("GRAMMAR_TOO_COSTLY", "GRAMMAR_GAVE_UP")  # a fast processor reaches the library's limit first
        assert decoded.token_ids and set(spelled(decoded.token_ids)) <= {"a", "b"}
    assert server.service.progress > server.scheduler.steps
    await until(lambda: not len(server.scheduler))


async def test_commands_of_a_session_wait_until_its_grammar_is_compiled(
    server: VerifierServer, client: Gateway
) -> None:
    """Open and close in one frame: compiled, opened, closed, in this order; then the number is free again."""
    structure = StructuredOutput("regex", "(wait|for|it){1,99}")
    decoded = client.sessions[7] = Decoded()
    open_ = verifier_pb2.DecodeCommand(session=7, epoch=1, open=opening(PROMPT, structure=structure, stop=[END]))
    close = verifier_pb2.DecodeCommand(session=7, epoch=1, close=verifier_pb2.DecodeClose())
    await client.send(open_, close)
    await until(decoded.done.is_set)
    assert decoded.end is not None and decoded.end.reason == verifier_pb2.FINISH_REASON_CANCELLED
    again = client.sessions[7] = Decoded()
    await client.send(open_)
    await until(lambda: len(again.token_ids) > 4)
    await client.send(close)
    await until(again.done.is_set)


@pytest.fixture
def ready() -> Grammar:
    return compiled(LANGUAGES["any"].structure)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> list[Future[Grammar]]:
    """Grammars that are being compiled until the test has the result."""
    futures: list[Future[Grammar]] = []

    def compile(grammars: Grammars, structure: StructuredOutput, salt: str = "", tenant: str = "") -> Future[Grammar]:
        futures.append(Future())
        return futures[-1]

    monkeypatch.setattr(Grammars, "compile", compile)
    return futures


async def test_sessions_whose_grammar_is_compiled_count_as_open(
    target: Engine, ready: Grammar, compiling: list[Future[Grammar]]
) -> None:
    structure = LANGUAGES["any"].structure
    async with verifier(target, model=TARGET, max_sessions=2) as server, gateway(server.address) as client:
        waiting = [(await client.open(PROMPT, structure=structure, stop=[END], tokens=4))[1] for _ in range(2)]
        await until(lambda: len(compiling) == 2)
        assert server.service.session_count == 2
        for structured in (None, structure):
            _, refused = await client.open(PROMPT, structure=structured, stop=[END])
            assert await ended(refused) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED")
        for future in compiling:
            future.set_result(ready)
        for decoded in waiting:
            await until(decoded.done.is_set)
            assert decoded.end is not None and not decoded.end.HasField("failure")
        await until(lambda: server.service.session_count == 0)


async def test_commands_that_wait_for_a_grammar_are_bounded(
    server: VerifierServer, client: Gateway, compiling: list[Future[Grammar]]
) -> None:
    number, flooded = await client.open(PROMPT, structure=LANGUAGES["any"].structure, stop=[END])
    credit = verifier_pb2.DecodeCommand(session=number, epoch=1, credit=verifier_pb2.DecodeCredit(tokens=1))
    await client.send(*[credit] * MOST_HELD)
    assert await ended(flooded) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED")
    await until(lambda: server.service.session_count == 0 and compiling[0].cancelled())


async def test_a_gateway_that_leaves_takes_along_what_is_being_compiled(server: VerifierServer) -> None:
    async with gateway(server.address) as other:
        for index in range(20):
            await other.open(PROMPT, structure=StructuredOutput("regex", f"leaving{index}"), stop=[END], tokens=2000)
    await until(lambda: not len(server.scheduler) and not server.service.by_id)
    await asyncio.wrap_future(server.service.grammars.compile(StructuredOutput("regex", "the last one")))
    assert not len(server.scheduler) and not server.service.by_id  # what was compiled meanwhile opened nothing
