"""The best nodes of a selection by other numbers than their drafters' claims."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.speculation.selection import ROOT, Selection

SHARES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])


@st.composite
def trees(draw: st.DrawFn) -> tuple[Selection, list[float]]:
    """A tree of up to 12 nodes and a path probability of each."""
    parents: list[int] = []
    depths: list[int] = []
    paths: list[float] = []
    for node in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(ROOT, node - 1))
        parents.append(parent)
        depths.append(1 + (depths[parent] if parent != ROOT else 0))
        paths.append(draw(SHARES) * (paths[parent] if parent != ROOT else 1.0))
    count = len(parents)
    tokens, claims = tuple(range(100, 100 + count)), tuple(-0.01 * node for node in range(count))
    sources = tuple((node % 3,) for node in range(count))
    return Selection(tokens, tuple(parents), tuple(depths), claims, claims, (None,) * count, sources), paths


@given(trees(), st.integers(0, 14))
def test_the_best_nodes_are_connected_and_no_others_are_better(tree: tuple[Selection, list[float]], size: int) -> None:
    whole, paths = tree
    chosen, numbers = whole.likeliest(paths, size)
    assert numbers == sorted(paths, reverse=True)[:size], "of a tree whose numbers never rise, the best are connected"
    for place, token in enumerate(chosen.token_ids):
        node = token - 100
        assert numbers[place] == paths[node]
        assert ROOT <= chosen.parents[place] < place
        assert chosen.path(place) == whole.path(node) and chosen.depths[place] == whole.depths[node]
        assert chosen.log_probs[place] == chosen.path_log_probs[place] == whole.log_probs[node]
        assert chosen.sources[place] == whole.sources[node]


@given(trees())
def test_fewer_nodes_are_the_first_of_more(tree: tuple[Selection, list[float]]) -> None:
    whole, paths = tree
    most = whole.likeliest(paths, len(whole))[0]
    assert [whole.likeliest(paths, size)[0] for size in range(len(whole))] == [most.head(n) for n in range(len(whole))]
