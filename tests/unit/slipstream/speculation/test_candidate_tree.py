"""The rules of the candidate tree, one example each; `test_candidates_model` compares any history with a model."""

from __future__ import annotations

import math

import pytest

from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.frame import Frame, Grafted, TreeLimits, check
from slipstream.speculation.selection import Selection

Path = tuple[int, ...]
PROMPT = (9, 8, 7)


def chain(base: int, *tokens: int, generation: int = 0, first_node: int = 1, source: int = 0) -> Frame:
    return Frame(base, generation, first_node, tokens, tuple(-0.1 for _ in tokens), source=source)


def paths(tree: CandidateTree) -> set[Path]:
    selection = tree.select_likeliest(10_000)
    return {selection.path(index) for index in range(len(selection))}


def test_a_chain_needs_no_parents_and_grows_by_frames() -> None:
    tree = CandidateTree(PROMPT)
    assert tree.graft(chain(3, 1, 2)).added == 2
    assert tree.graft(chain(3, 3, first_node=3)).added == 1
    assert tree.select_likeliest(9).token_ids == (1, 2, 3)
    assert (tree.node_count, tree.depth, tree.empty) == (3, 3, False)


def test_a_commit_inside_the_tree_keeps_descendants_and_node_numbers() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1, 2, 3))
    tree.commit([1, 2])
    assert paths(tree) == {(3,)}
    assert tree.graft(chain(3, 4, first_node=4)).added == 1
    assert tree.graft(Frame(3, 0, 5, (5,), (-1.0,), (2,))).added == 1
    assert paths(tree) == {(3,), (3, 4), (5,)}


def test_a_commit_outside_the_tree_empties_it_and_orphans_what_comes_later() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1, 2))
    tree.commit([1, 5])
    assert tree.empty
    assert tree.graft(chain(3, 6, first_node=3)).dropped == {"orphan": 1}


def test_a_frame_on_an_older_prefix_catches_up_with_the_commits() -> None:
    tree = CandidateTree(PROMPT)
    tree.commit([1, 2])
    grafted = tree.graft(chain(3, 1, 2, 3))
    assert (grafted.added, grafted.committed) == (1, 2)
    assert paths(tree) == {(3,)}


def test_a_frame_on_another_prefix_is_dropped_from_its_first_difference_on() -> None:
    tree = CandidateTree(PROMPT)
    tree.commit([1, 2])
    assert tree.graft(chain(3, 1, 7, 3)).dropped == {"diverged": 1, "orphan": 1}


def test_candidates_beyond_the_committed_prefix_are_a_protocol_error_that_changes_nothing() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1))
    with pytest.raises(FailedPrecondition):
        tree.graft(chain(4, 1, generation=1))
    assert paths(tree) == {(1,)}


def test_a_generation_cannot_move_its_root() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1))
    with pytest.raises(InvalidArgument):
        tree.graft(chain(2, 1, first_node=2))


def test_a_new_generation_drops_nodes_that_only_the_old_one_of_its_drafter_sent() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1, 2))
    tree.graft(chain(3, 1, source=1))
    tree.graft(chain(3, 5, generation=1))
    assert paths(tree) == {(1,), (5,)}
    assert tree.graft(chain(3, 6)).dropped == {"stale": 1}


def test_two_drafters_share_a_node_and_the_higher_probability_counts() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(Frame(3, 0, 1, (1,), (-2.0,)))
    grafted = tree.graft(Frame(3, 0, 1, (1, 2), (-1.0, -3.0), source=1))
    assert (grafted.added, grafted.merged) == (1, 1)
    assert tree.select_likeliest(2).log_probs == (-1.0, -3.0)


def test_memory_stays_bounded_however_long_a_generation_lives() -> None:
    limits = TreeLimits(nodes=8, depth=8, window=6)
    tree = CandidateTree(PROMPT, limits)
    for number in range(1, 400):  # the drafter stays one token ahead
        assert tree.graft(chain(3, number % 5, first_node=number)).added == 1
        tree.commit([number % 5])
        assert len(tree._sources[0].names) <= limits.nodes + limits.window
        assert len(tree._trail) <= limits.window + 1
    assert tree.graft(Frame(3, 0, 400, (1,), (-1.0,), (5,))).dropped == {"orphan": 1}


def test_a_drafter_that_repeats_itself_under_new_numbers_runs_into_a_limit() -> None:
    limits = TreeLimits(nodes=8, window=4)
    tree = CandidateTree(PROMPT, limits)
    fates = [tree.graft(Frame(3, 0, number, (1,), (-1.0,), (0,))) for number in range(1, 50)]
    assert sum(fate.merged for fate in fates) == limits.nodes + limits.window - 1
    assert fates[-1].dropped == {"full": 1}


def test_nodes_beyond_the_limits_are_dropped_and_counted() -> None:
    tree = CandidateTree(PROMPT, TreeLimits(nodes=3, depth=2))
    assert tree.graft(chain(3, 1, 2, 3, 4)).dropped == {"deep": 1, "orphan": 1}
    assert tree.graft(Frame(3, 0, 9, (5, 6), (-1.0, -1.0), (0, 0))).dropped == {"full": 1}


def test_a_tree_selection_prefers_likely_paths_and_a_chain_takes_first_children() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(Frame(3, 0, 1, (1, 2, 3, 4), (-3.0, -0.5, -0.5, -0.1), (0, 0, 1, 2)))
    assert tree.select_likeliest(2).token_ids == (2, 4)
    assert tree.select_likeliest(9).head(2) == tree.select_likeliest(2)
    assert tree.select_first_children(9).token_ids == (1, 3)
    assert tree.select_first_children(1).token_ids == (1,)
    assert tree.select_likeliest(0) == Selection() == tree.select_first_children(0) == tree.select_first_created(0)


def test_a_selection_of_draws_takes_the_first_created_whatever_their_probability() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(Frame(3, 0, 1, (5, 4, 3, 2, 6), (-3.0, -0.5, -9.0, -0.1, -0.2), (0, 0, 1, 2, 1)))
    assert tree.select_first_created(9).token_ids == (5, 4, 3, 2, 6)
    for budget in range(6):
        selection = tree.select_first_created(budget)
        assert selection == tree.select_first_created(9).head(budget)
        assert all(parent < index for index, parent in enumerate(selection.parents))
    assert tree.select_first_created(9).path_log_probs == pytest.approx((-3.0, -0.5, -12.0, -0.6, -3.2))
    tree.commit([5])
    assert tree.select_first_created(1).token_ids == (3,)
    tree.graft(Frame(3, 0, 6, (1,), (0.0,), (1,)))
    assert tree.select_first_created(9).token_ids == (3, 6, 1)


def test_a_selection_carries_the_distributions() -> None:
    tree, proposal = CandidateTree(PROMPT), DraftDistribution((1, 2), (3, 4))
    tree.graft(chain(3, 1, 2)._replace(distributions=(proposal, None)))
    assert tree.select_likeliest(2).distributions == (proposal, None)


def test_a_chain_stays_usable_while_it_is_accepted_token_by_token() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, *range(6)))
    for token in range(6):
        assert tree.select_first_created(1).token_ids == (token,)
        tree.commit([token])
    assert tree.empty


@pytest.mark.parametrize(
    "frame",
    [
        chain(3, 10),
        chain(3, -1),
        chain(3, 1, first_node=0),
        chain(-1, 1),
        chain(3, 1, generation=-1),
        chain(3, *([1] * 257)),
        Frame(3, 0, 1, (1,), ()),
        Frame(3, 0, 1, (1,), (0.1,)),
        Frame(3, 0, 1, (1,), (math.nan,)),
        Frame(3, 0, 1, (1,), (-math.inf,)),
        Frame(3, 0, 1, (1, 2), (0.0, 0.0), (0,)),
        Frame(3, 0, 1, (1, 2), (0.0, 0.0), (0, 2)),
        Frame(3, 0, 1, (1, 2), (0.0, 0.0), (0, -1)),
        Frame(3, 0, 1, (1, 2), (0.0, 0.0), distributions=(None,)),
    ],
)
def test_a_frame_that_no_correct_drafter_sends_is_refused(frame: Frame) -> None:
    with pytest.raises(InvalidArgument):
        check(frame, 10, TreeLimits())


def test_rounding_above_zero_is_clamped() -> None:
    assert check(Frame(3, 0, 1, (1, 2), (1e-7, -1.0)), 10, TreeLimits()).log_probs == (0.0, -1.0)


def test_a_commit_distinguishes_wrong_candidates_from_used_up_ones() -> None:
    tree = CandidateTree(PROMPT)
    assert not tree.commit([9]), "nobody guessed, so nobody was wrong"
    tree.graft(chain(4, 1, 2))
    assert not tree.commit([1]) and not tree.commit([2, 7]), "all were right; the last token is beyond them"
    tree.graft(chain(7, 1, 2, generation=1))
    assert tree.commit([1, 3]), "2 was guessed, 3 came"


def test_a_selection_names_the_senders_of_each_node() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1, 2, source=7))
    tree.graft(chain(3, 1, 5, source=8))
    selection = tree.select_likeliest(9)
    senders = {selection.path(index): set(selection.sources[index]) for index in range(len(selection))}
    assert senders == {(1,): {7, 8}, (1, 2): {7}, (1, 5): {8}}
    tree.forget(8)
    assert tree.select_likeliest(9).sources == ((7,), (7,))


def test_a_tree_reports_whether_it_holds_at_least_a_number_of_candidates() -> None:
    tree = CandidateTree(PROMPT)
    assert tree.holds(0, 0) and tree.holds(-1, 0) and not tree.holds(1, 0)
    tree.graft(Frame(3, 0, 1, (1, 2, 3), (-1.0, -1.0, -1.0), (0, 0, 1)))
    assert tree.holds(1, 0) and tree.holds(3, 0) and not tree.holds(4, 0)
    tree.commit([1])
    assert tree.holds(1, 0) and not tree.holds(2, 0)
    tree.graft(chain(tree.base_length, 8, 9, source=1))
    assert tree.holds(2, 1) and not tree.holds(2, 0), "each drafter's own"


def test_a_source_is_followed_while_the_text_stays_in_its_tree() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1, 2, source=5))
    assert not tree.follows(5)
    tree.commit([1])
    assert tree.follows(5) and not tree.follows(4)
    tree.commit([7])
    assert not tree.follows(5)


def test_the_likeliest_chain_takes_the_likeliest_child_of_each_node() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(Frame(3, 0, 1, (1, 2, 3, 4, 5), (-1.0, -0.5, -0.1, -0.9, -0.8), (0, 0, 1, 2, 2)))
    assert tree.select_likeliest_chain(9).token_ids == (2, 5)
    assert tree.select_likeliest_chain(9).path_log_probs == pytest.approx((-0.5, -1.3))
    assert tree.select_likeliest_chain(1).token_ids == (2,)
    assert tree.select_likeliest_chain(0) == Selection()


def test_every_change_of_a_tree_has_a_version_of_its_own() -> None:
    tree = CandidateTree(PROMPT)
    versions = [tree.version]
    for change in (lambda: tree.graft(chain(3, 1, 2)), lambda: tree.commit([1]), lambda: tree.forget(0)):
        change()
        versions.append(tree.version)
    assert versions == [0, 1, 2, 3]


def test_the_head_of_a_selection_is_the_selection_where_it_is_no_longer() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1, 2))
    selection = tree.select_likeliest(9)
    assert selection.head(2) is selection.head(3) is selection
    assert selection.head(1).token_ids == (1,)


def test_undecided_candidates_are_checked_until_they_are_allowed_or_removed() -> None:
    answers: dict[Path, bool] = {}
    tree = CandidateTree(PROMPT)
    tree.admits = lambda path, token: answers.get((*path, token))
    tree.graft(Frame(3, 0, 1, (1, 2, 3, 4, 5), (-0.1,) * 5, (0, 1, 2, 0, 0)))
    assert (tree.recheck(), paths(tree), tree.node_count) == (0, set(), 5)
    answers |= {(1,): True, (1, 2): False, (4,): True}
    version = tree.version
    assert tree.recheck() == 2  # and the one below it
    assert (tree.version, paths(tree), tree.node_count) == (version + 1, {(1,), (4,)}, 3)
    assert tree.graft(Frame(3, 0, 6, (6,), (-0.1,), (3,))).dropped == {"orphan": 1}
    answers[5,] = True
    assert (tree.recheck(), paths(tree)) == (0, {(1,), (4,), (5,)})


def test_committed_nodes_are_checked_no_more_but_their_descendants_are() -> None:
    answers: dict[Path, bool] = {}
    tree = CandidateTree(PROMPT)
    tree.admits = lambda path, token: answers.get((*path, token))
    tree.graft(chain(3, 1, 2))
    tree.commit([1])
    answers[2,] = True
    assert (tree.recheck(), paths(tree)) == (0, {(2,)})


def test_a_chain_ends_before_the_first_candidate_that_is_not_known_to_be_allowed() -> None:
    tree = CandidateTree(PROMPT)
    tree.admits = lambda path, token: None if path else True
    tree.graft(chain(3, 1, 2))
    assert tree.select_likeliest_chain(5).token_ids == (1,)


def test_forbidden_candidates_are_counted_and_allowed_ones_come_before_undecided_ones() -> None:
    tree = CandidateTree(PROMPT)
    tree.admits = lambda path, token: {1: False, 2: None}.get(token, True)
    assert tree.graft(Frame(3, 0, 1, (1, 2, 3), (-0.1, -0.1, -0.9), (0, 0, 0))).dropped == {"forbidden": 1}
    assert tree.select_likeliest_chain(5).token_ids == (3,)


def test_a_limited_window_of_committed_tokens_is_remembered() -> None:
    tree = CandidateTree(PROMPT, TreeLimits(window=3))
    tree.commit([1, 2, 3])
    grafted = tree.graft(chain(3, 1, 2, 3, 4))
    assert (grafted.committed, grafted.added) == (3, 1)
    assert tree.graft(chain(2, 7, 1, source=1)).dropped == {"orphan": 2}


def test_frames_at_the_limits_pass_the_check() -> None:
    first = Frame(0, 0, 1, (1, 2), (1e-6, -0.5))
    assert check(first, 3, TreeLimits(frame_nodes=2)).log_probs == (0.0, -0.5)


def test_a_frame_may_be_based_on_any_committed_position_from_the_first_on() -> None:
    grafted = CandidateTree(PROMPT).graft(chain(0, *PROMPT, 1))
    assert (grafted.committed, grafted.added) == (3, 1)


def test_frames_of_one_generation_add_up_on_an_empty_prefix_too() -> None:
    tree = CandidateTree(())
    tree.graft(chain(0, 1))
    version = tree.version
    tree.graft(chain(0, 2, first_node=2))
    assert paths(tree) == {(1,), (1, 2)} and tree.version == version + 1


def test_grafting_reports_the_outcome_of_each_node() -> None:
    tree = CandidateTree(PROMPT)
    tree.graft(chain(3, 1, 2, generation=1))
    assert tree.graft(chain(3, 1, 2, generation=1)) == Grafted(dropped={"duplicate": 2})
    assert tree.graft(chain(3, 1, source=1)) == Grafted(merged=1)
    assert tree.graft(chain(3, 1)) == Grafted(dropped={"stale": 1})
    assert tree.graft(chain(3)) == Grafted()


def test_nodes_that_only_a_lost_drafter_sent_are_removed_and_checked_no_more() -> None:
    tree = CandidateTree(PROMPT)
    tree.admits = lambda path, token: True if token < 3 else None
    tree.graft(chain(3, 1, 2, 3, 4))
    tree.graft(chain(3, 1, 2, source=1))
    tree.forget(0)
    assert (tree.node_count, tree.recheck(), paths(tree)) == (2, 0, {(1,), (1, 2)})
