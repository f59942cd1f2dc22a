"""What a remote drafter may send: units earned and spent, frames against time, and sizes before anything is copied."""

from __future__ import annotations

import pytest

from slipstream.errors import InvalidArgument
from slipstream.speculation.draft_distribution import MAX_TOKENS, DraftDistribution
from slipstream.speculation.frame import TreeLimits
from slipstream.v1 import types_pb2
from verifier_svc.sources.flow_control import (
    COMMANDS,
    ENTRIES_PER_UNIT,
    FRAMES_PER_S,
    UNITS_PER_NODE,
    FrameRate,
    WorkAllowance,
    read_frame,
    work_of,
)

LIMITS = TreeLimits(frame_nodes=3)
VOCABULARY = 10


def left(allowance: WorkAllowance) -> int:
    """What can be spent, unit by unit; nothing is left afterwards."""
    spent = 0
    while allowance.spend(1):
        spent += 1
    return spent


def sent(nodes: int, distributions: int = 0, entries: int = 1) -> types_pb2.Candidates:
    message = types_pb2.Candidates(
        base_length=7,
        generation=2,
        first_node=4,
        token_ids=range(nodes),
        parents=range(nodes),
        confidences=bytes(32 * n for n in range(nodes)),
    )
    for _ in range(distributions):
        message.distributions.add(token_ids=range(entries), weights=range(1, entries + 1))
    return message


def test_there_is_no_credit_before_a_command_and_credit_for_its_whole_answer_after_it() -> None:
    allowance = WorkAllowance()
    assert not allowance.spend(1)
    allowance.earn(8)
    assert left(allowance) == 8 * UNITS_PER_NODE


def test_a_ratio_rule_s_command_pays_for_the_longest_distributions_too() -> None:
    allowance = WorkAllowance()
    allowance.earn(8, with_distributions=True)
    assert left(allowance) == 8 * (UNITS_PER_NODE + MAX_TOKENS // ENTRIES_PER_UNIT)


def test_a_drafter_that_answers_every_command_with_a_whole_tree_never_runs_out_of_credit() -> None:
    """Node by node, as late as it likes within COMMANDS."""
    for late in range(1, COMMANDS):
        allowance = WorkAllowance()
        for _ in range(late):
            allowance.earn(8)
        for _ in range(100):
            allowance.earn(8)
            assert all(allowance.spend(2) for _ in range(8))


@pytest.mark.parametrize("sessions", [(), (3,)])
def test_unused_credit_is_saved_up_to_a_bound(sessions: tuple[int, ...]) -> None:
    allowance = WorkAllowance()
    for _ in range(1_000):
        allowance.earn(8, *sessions)
    allowance.earn(1, *sessions)  # a smaller command takes nothing away
    assert left(allowance) == COMMANDS * sum(sessions or (1,)) * 8 * UNITS_PER_NODE


def test_a_drafter_that_spends_more_than_its_credit_has_none_left() -> None:
    allowance = WorkAllowance()
    allowance.earn(8)
    assert allowance.spend(15) and not allowance.spend(2) and not allowance.spend(1)


def test_frames_come_in_bursts_but_not_faster_for_long() -> None:
    rate = FrameRate(5.0)
    assert all(rate.admit(5.0) for _ in range(int(FRAMES_PER_S)))
    assert not rate.admit(5.0)
    assert not rate.admit(5.9)  # the debt of a flood, which this one renews
    assert not rate.admit(6.9)
    assert rate.admit(7.91)
    steady = FrameRate(0.0)
    assert all(steady.admit(number / FRAMES_PER_S) for number in range(10 * int(FRAMES_PER_S)))


def test_a_frame_is_read_as_it_was_sent() -> None:
    frame = read_frame(sent(3), 5, VOCABULARY, LIMITS, with_distributions=True)
    assert (frame.base_length, frame.generation, frame.first_node, frame.source) == (7, 2, 4, 5)
    assert (frame.token_ids, frame.log_probs, frame.parents) == ((0, 1, 2), (0.0, -1.0, -2.0), (0, 1, 2))
    assert len(frame.distributions) == 0


@pytest.mark.parametrize("part", ["token_ids", "parents", "confidences", "distributions"])
def test_whichever_part_is_too_long_is_refused_before_it_is_read(part: str) -> None:
    message = types_pb2.Candidates(first_node=1)
    if part == "confidences":
        message.confidences = bytes(LIMITS.frame_nodes + 1)
    elif part == "distributions":
        message.distributions.extend([types_pb2.Distribution()] * (LIMITS.frame_nodes + 1))
    else:
        getattr(message, part).extend([0] * (LIMITS.frame_nodes + 1))
    with pytest.raises(InvalidArgument, match="holds more than 3"):
        read_frame(message, 1, VOCABULARY, LIMITS, with_distributions=False)


def test_frames_that_no_correct_drafter_sends_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="vocabulary of 2"):
        read_frame(sent(3), 1, 2, LIMITS, with_distributions=False)


def test_distributions_are_read_where_the_rule_needs_them_and_checked_when_they_are_read() -> None:
    message = sent(2, distributions=2, entries=3)
    message.distributions[1].token_ids[0] = VOCABULARY
    assert len(read_frame(message, 1, VOCABULARY, LIMITS, with_distributions=False).distributions) == 0
    frame = read_frame(message, 1, VOCABULARY, LIMITS, with_distributions=True)
    assert len(frame.distributions) == 2 and frame.distributions[0] == DraftDistribution((0, 1, 2), (1, 2, 3))
    with pytest.raises(InvalidArgument, match="outside the vocabulary"):
        frame.distributions[1]


def test_a_frame_costs_itself_its_nodes_and_the_longer_half_of_its_distributions() -> None:
    message = sent(3, distributions=3, entries=ENTRIES_PER_UNIT)
    frame = read_frame(message, 1, VOCABULARY, LIMITS, with_distributions=True)
    assert work_of(frame) == 1 + 3 + 3
    few = sent(3, distributions=3, entries=5)
    assert work_of(read_frame(few, 1, VOCABULARY, LIMITS, with_distributions=True)) == 1 + 3
    for each in message.distributions:
        each.weights.extend([1] * ENTRIES_PER_UNIT)
    assert work_of(read_frame(message, 1, VOCABULARY, LIMITS, with_distributions=True)) == 1 + 3 + 6
    for each in message.distributions:
        each.token_ids.extend([1] * 2 * ENTRIES_PER_UNIT)
    assert work_of(read_frame(message, 1, VOCABULARY, LIMITS, with_distributions=True)) == 1 + 3 + 9
    assert work_of(read_frame(message, 1, VOCABULARY, LIMITS, with_distributions=False)) == 1 + 3
