"""An executor that verifies short chains alone, below the real scheduler and planner: texts are as with trees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.virtual import Outcome, World, decode, open_request, system
from capacity.clock import run
from slipstream.engine.engine import Engine
from slipstream.speculation.selection import ROOT
from slipstream.v1 import types_pb2, verifier_pb2
from tests.support.chain_executor import ChainExecutor
from verifier_svc.execution.executor import ScheduledSequence, StepOutcome

WORLD = World(delay_s=0.002)
"""Its drafter proposes up to four tokens below a node."""
TOKENS, MAX_DRAFT_TOKENS = 120, 8


def chained(longest: int) -> tuple[World, list[ChainExecutor]]:
    """The world with such an executor, which the list holds once the world was run."""
    built: list[ChainExecutor] = []

    def build(engine: Engine) -> ChainExecutor:
        built.append(ChainExecutor(engine, longest))
        return built[0]

    return replace(WORLD, executor=build), built


def texts(outcome: Outcome) -> dict[int, list[int]]:
    by_session: dict[int, list[int]] = {}
    for done in outcome.rounds:
        by_session.setdefault(done.session, []).extend(done.token_ids)
    return by_session


@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("longest", [1, 3])
def test_texts_are_those_of_the_embedded_executor_and_every_step_verifies_short_chains(
    longest: int, sessions: int
) -> None:
    world, built = chained(longest)
    with_chains = run(decode(world, sessions, TOKENS, MAX_DRAFT_TOKENS))
    with_trees = run(decode(WORLD, sessions, TOKENS, MAX_DRAFT_TOKENS))
    plain = run(decode(WORLD, sessions, TOKENS, 0))
    assert texts(with_chains) == texts(with_trees) == texts(plain)
    verified = built[0].verified
    assert all(chosen.parents == (ROOT, 0, 1)[: len(chosen)] for chosen in verified)
    assert max(map(len, verified)) == longest
    assert sum(done.drafted for done in with_chains.rounds) == sum(map(len, verified))
    assert sum(done.accepted for done in with_chains.rounds) >= 0.2 * with_chains.tokens
    assert with_chains.tokens_per_s > plain.tokens_per_s


def test_siblings_raise_the_token_rate_though_they_are_not_verified() -> None:
    """What the target chooses instead of a candidate is often a sibling of it, and then the chain below is there."""
    wide, narrow = (
        run(decode(replace(chained(3)[0], width=width), 1, TOKENS, MAX_DRAFT_TOKENS)).tokens_per_s for width in (4, 1)
    )
    assert wide > 1.05 * narrow


def test_the_chain_follows_the_likeliest_alternative() -> None:
    alternatives: list[int] = []

    class Comparing(ChainExecutor):
        def execute(self, step: list[ScheduledSequence]) -> list[StepOutcome]:
            for scheduled in step:
                if chosen := scheduled.selection:
                    best = scheduled.session.tree.select_likeliest(MAX_DRAFT_TOKENS)
                    first = [best.log_probs[node] for node, parent in enumerate(best.parents) if parent == ROOT]
                    assert chosen.log_probs[0] == max(first)
                    alternatives.append(len(first))
            return super().execute(step)

    outcome = run(decode(replace(WORLD, executor=Comparing), 1, TOKENS, MAX_DRAFT_TOKENS))
    assert outcome.tokens == TOKENS and max(alternatives) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_ratio_rule_is_given_chains_too(temperature: float) -> None:
    world, built = chained(3)

    async def serve() -> list[int]:
        async with system(world) as running:
            gateway = running.gateway()
            request = open_request(0, TOKENS, MAX_DRAFT_TOKENS, running.drafter)
            opened = request.commands[0].open
            opened.sampling.temperature, opened.sampling.acceptance = temperature, types_pb2.ACCEPTANCE_RULE_REJECTION
            opened.drafters[0].trusted = True
            gateway.receive(request)
            token_ids: list[int] = []
            while True:
                for reply in await gateway.outbox.take():
                    if isinstance(reply, verifier_pb2.SessionEnd):
                        assert not reply.HasField("failure"), reply
                        return token_ids
                    if isinstance(reply, verifier_pb2.Round):
                        token_ids += reply.token_ids

    assert len(run(serve())) == TOKENS
    assert built[0].verified and max(map(len, built[0].verified)) <= 3
