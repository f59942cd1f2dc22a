"""Connections of the HTTP listener: whoever has the most makes room, of what it does not use."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gateway.api.http.connections import SPARE, Connections

MOST = 8


@dataclass(eq=False)
class Line:
    origin: str
    idle: bool = True
    closed: bool = False

    def abort(self) -> None:
        self.closed = True


def opened(connections: Connections, origin: str, *, idle: bool = True) -> tuple[Line, bool]:
    line = Line(origin, idle)
    return line, connections.add(line, origin)


def test_an_address_with_too_many_connections_loses_its_own_oldest_ones_first() -> None:
    connections = Connections(MOST)
    other, room = opened(connections, "other")
    lines = [opened(connections, "many")[0] for _ in range(50)]
    assert room and not other.closed and len(connections) == MOST
    assert [line.closed for line in lines] == [True] * 43 + [False] * 7
    connections.note_use(lines[43], "many")
    _, room = opened(connections, "third")
    assert room and lines[44].closed and not lines[43].closed and not other.closed


def test_connections_in_use_stay_and_excess_ones_are_refused_or_closed() -> None:
    connections = Connections(MOST)
    busy = [opened(connections, "busy", idle=False) for _ in range(MOST)]
    assert all(room for _, room in busy)
    late = [opened(connections, "late", idle=False) for _ in range(SPARE + 5)]
    assert not any(room for _, room in late) and not any(line.closed for line, _ in busy)
    assert [line.closed for line, _ in late] == [False] * SPARE + [True] * 5
    for line, _ in (*busy, *late):
        connections.remove(line, line.origin)
    assert len(connections) == 0 and opened(connections, "late")[1]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_no_address_loses_a_connection_to_one_that_has_more(coming: list[tuple[str, bool]]) -> None:
    connections, lines = Connections(MOST), list[Line]()
    for origin, idle in coming:
        before = {each: sum(line.origin == each and not line.closed for line in lines) for each in "abc"}
        was_closed = [line.closed for line in lines]
        line, room = opened(connections, origin, idle=idle)
        lost = [each for each, closed in zip(lines, was_closed, strict=True) if each.closed and not closed]
        lines.append(line)
        assert len(lost) <= 1 and len(connections) == sum(not each.closed for each in lines)
        assert all(each.idle and before[each.origin] >= before[origin] + (each.origin == origin) - 1 for each in lost)
        assert room == (len(connections) <= MOST)
