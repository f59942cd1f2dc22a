"""Chains of a draft model: as one is proposed level by level, and sessions of a drafting loop by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from slipstream.proposers.base import ROOT, DeeperLevels, Proposal, ProposedNode, Proposer, ProposerContext
from slipstream.proposers.chain_model import ChainProposer
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.structured_output import StructuredOutput

FAR = -1e9
"""Log-probability that every path reaches."""
LEVELS = 4
VOCABULARY = 4096


def context(
    handle: object,
    tokens: list[int],
    prompt_length: int,
    sampling: SamplingParams,
    levels: int = 1,
    nodes: tuple[ProposedNode, ...] = (),
    expand: int = ROOT,
    structure: StructuredOutput | None = None,
    salt: str = "",
) -> ProposerContext:
    """Of a sequence whose tree has these nodes already."""
    return ProposerContext(
        handle=handle,
        tokens=tokens,
        length=len(tokens),
        prompt_length=prompt_length,
        max_length=len(tokens) + 40,
        sampling=sampling,
        node_tokens=[node.token for node in nodes],
        parents=[node.parent for node in nodes],
        expand=[expand],
        deeper=DeeperLevels(levels - 1, 1, [0.0], FAR) if levels > 1 else None,
        cache_salt=salt,
        structured_output=structure,
        noise_nodes=[0],
    )


def chain_of(model: Proposer, wanted: ProposerContext) -> list[ProposedNode]:
    """What `model` proposes below the expanded node, then below the best of that, and so on."""
    nodes: list[ProposedNode] = []
    start, levels = wanted.expand, 1 + (wanted.deeper.levels if wanted.deeper is not None else 0)
    for _ in range(levels):
        (answer,) = model.propose(
            [
                replace(
                    wanted,
                    node_tokens=[*wanted.node_tokens, *(node.token for node in nodes)],
                    parents=[*wanted.parents, *(node.parent for node in nodes)],
                    expand=start,
                    deeper=None,
                )
            ]
        )
        assert isinstance(answer, Proposal), answer
        start = [len(wanted.node_tokens) + len(nodes)]
        nodes += answer.nodes
    return nodes


def assert_same(found: list[ProposedNode], expected: list[ProposedNode]) -> None:
    """The same nodes; confidences and distributions but for the rounding of float32."""
    assert [(node.parent, node.token) for node in found] == [(node.parent, node.token) for node in expected]
    assert all(abs(a.log_prob - b.log_prob) < 1e-3 for a, b in zip(found, expected, strict=True))
    for a, b in zip(found, expected, strict=True):
        assert (a.distribution is None) == (b.distribution is None)
        if a.distribution is not None and b.distribution is not None:
            weights = zip(a.distribution.weights, b.distribution.weights, strict=True)
            assert a.distribution.token_ids == b.distribution.token_ids
            assert all(abs(one - other) <= 40 for one, other in weights)


class _Walk:
    """One session of a drafting loop by chance: commits of what was proposed and of other tokens, branches that are
    expanded later, rollbacks."""

    def __init__(self, number: int, prompt: tuple[int, ...], chance: random.Random) -> None:
        self.handle, self.prompt, self.tokens, self.chance = number, prompt, list(prompt), chance
        self.sampling = SamplingParams(temperature=0.8 * (number % 2), seed=number)
        self.nodes: list[ProposedNode] = []
        self.expanded = {ROOT}
        self.start = ROOT

    def context(self) -> ProposerContext:
        levels = self.chance.randint(1, LEVELS)
        return context(self.handle, self.tokens, len(self.prompt), self.sampling, levels, tuple(self.nodes), self.start)

    def go_on(self, proposed: list[ProposedNode]) -> None:
        self.nodes += proposed
        self.expanded |= {node.parent for node in proposed}
        kind = self.chance.random()
        if kind < 0.4:
            waiting = [number for number in range(len(self.nodes)) if number not in self.expanded]
            self.start = self.chance.choice(waiting)
            return
        if kind < 0.5:  # a rollback comes with another list
            self.tokens = self.tokens[: self.chance.randint(len(self.prompt) - 9, len(self.tokens))]
        else:
            known = self.chance.choice(range(len(self.nodes)))
            path = []
            while known != ROOT:
                path.append(self.nodes[known].token)
                known = self.nodes[known].parent
            self.tokens += path[::-1]
            if kind < 0.8:
                self.tokens.append(self.chance.randrange(VOCABULARY))
        self.nodes, self.expanded, self.start = [], {ROOT}, ROOT


def walk(
    chains: ChainProposer,
    model: Proposer,
    prompts: Sequence[tuple[int, ...]],
    steps: int,
    compared_every: int,
) -> int:
    """Sessions of these prompts, of which some are part of each step; how many chains were what `model` proposes."""
    chance = random.Random(3)
    sessions = [_Walk(number, prompt, chance) for number, prompt in enumerate(prompts)]
    compared = 0
    for step in range(1, steps + 1):
        asked = [(session, session.context()) for session in sessions if chance.random() < 0.7]
        answers = chains.propose([wanted for _, wanted in asked])
        for (session, wanted), answer in zip(asked, answers, strict=True):
            assert isinstance(answer, Proposal), answer
            if step % compared_every == 0:
                assert_same(answer.nodes, chain_of(model, wanted))
                compared += 1
            session.go_on(answer.nodes)
    for session in sessions:
        model.close_sequence(session.handle)
        chains.close_sequence(session.handle)
    return compared
