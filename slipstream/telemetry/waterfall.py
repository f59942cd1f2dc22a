"""A trace as lines for the terminal: its spans in time, with durations and the main attributes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from rich.table import Table
from rich.text import Text

from slipstream.errors import NotFound
from slipstream.telemetry import spans
from slipstream.telemetry.trace_reader import ReadSpan

BAR, SHORTEST_BAR = 44, 12
GAPS = 8
"""Spaces between the columns."""
"""Width in characters of the whole trace, on a wide and on a narrow terminal."""
NOTES = 50
"""Width in characters of the attributes on a wide terminal."""
COLOURS = dict(zip(spans.SERVICES, ("cyan", "green", "yellow"), strict=True))
NOTED = (
    *(
        spans.REASON,
        spans.DRAFTED,
        spans.ACCEPTED,
        spans.SENT,
        spans.DROPPED,
        spans.DISCARDED,
        spans.TOKENS,
        spans.CACHED,
    ),
    *(spans.PASSES, spans.MISS, spans.MISSES, spans.BY_DRAFTER, spans.REHOMED, spans.SLOWEST),
    *(spans.QUEUE, spans.BUBBLE, spans.COMPUTE, spans.WIRE, spans.COMMITTING, spans.ERROR),
)
"""Attributes that a line shows, unless they are empty or zero."""
TIMES = (spans.WAIT, spans.QUEUE, spans.BUBBLE, spans.COMPUTE, spans.WIRE, spans.COMMITTING)
"""Attributes that come first where many rounds are added up: the parts of their time."""


def waterfall(trace: Iterable[ReadSpan], rounds: range | None = None, width: int = 240) -> Table:
    """A table of spans in order of time, parents before children; with `rounds`, of these rounds alone. On a terminal
    of `width` characters names and times are shown in full, bars get shorter and attributes are cut off.

    Raises NotFound where no span is to be shown.
    """
    shown = shown_spans(trace, rounds)
    first = min(span.began_ns for _, span in shown)
    last = max(span.ended_ns for _, span in shown)
    names = max(2 * depth + len(_name(span)) for depth, span in shown)
    times = max(7, len(f"{(last - first) / 1e6:.1f}"))
    bar = max(SHORTEST_BAR, min(BAR, width - names - 2 * times - NOTES))
    room = max(0, width - names - 2 * times - bar - GAPS)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("span", no_wrap=True, min_width=names)
    table.add_column("at ms", justify="right", no_wrap=True, min_width=times)
    table.add_column("took ms", justify="right", no_wrap=True, min_width=times)
    table.add_column("", no_wrap=True, min_width=bar)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for depth, span in shown:
        colour = COLOURS.get(span.service, "white")
        table.add_row(
            Text("  " * depth + _name(span), style=colour),
            f"{(span.began_ns - first) / 1e6:.1f}",
            f"{(span.ended_ns - span.began_ns) / 1e6:.1f}",
            Text(_bar(span, first, last, bar), style="red" if span.error else colour),
            _shortened(Text(_notes(span), style="dim"), room),
        )
    return table


def _shortened(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text


def shown_spans(trace: Iterable[ReadSpan], rounds: range | None) -> list[tuple[int, ReadSpan]]:
    """(depth, span) of each line of the waterfall. Raises NotFound where there is none."""
    if shown := list(_arranged(trace, rounds)):
        return shown
    raise NotFound("the trace has no such rounds; leave --rounds out to see all.", reason="NO_ROUNDS")


def _arranged(trace: Iterable[ReadSpan], rounds: range | None) -> Iterator[tuple[int, ReadSpan]]:
    """Yields (depth, span). A span whose parent is missing is a root."""
    known = {span.span_id: span for span in trace}
    children: defaultdict[str, list[ReadSpan]] = defaultdict(list)
    for span in sorted(known.values(), key=lambda span: span.began_ns):
        if rounds is None or _touches(span, rounds):
            children[span.parent_id if span.parent_id in known else ""].append(span)
    waiting = [(0, span) for span in reversed(children[""])]
    while waiting:
        depth, span = waiting.pop()
        if rounds is None or span.name not in (spans.GENERATE, spans.RESUME, spans.PREFILL):
            yield depth, span
        waiting += [(depth + 1, child) for child in reversed(children[span.span_id])]


def _touches(span: ReadSpan, rounds: range) -> bool:
    """True for a span of one of these rounds, or of no round in particular."""
    first: int | None = span.attributes.get(spans.INDEX)
    if first is None or span.name not in (spans.ROUND, spans.ROUNDS_SUM):
        return True
    count: int = span.attributes.get(spans.ROUNDS, 1)
    return first < rounds.stop and first + count > rounds.start


def _name(span: ReadSpan) -> str:
    index = span.attributes.get(spans.INDEX)
    drafter = span.attributes.get(spans.DRAFTER)
    if span.name == spans.ROUNDS_SUM and index is not None:
        return f"{span.name} {index}-{index + span.attributes.get(spans.ROUNDS, 1) - 1}"
    if span.kind == "server" and span.title:
        return span.title
    return f"{span.name} {index}" if index is not None else f"{span.name} {drafter}" if drafter else span.name


def _bar(span: ReadSpan, first: int, last: int, width: int) -> str:
    """A bar at least one character wide."""
    scale = width / max(1, last - first)
    begin = min(width - 1, int((span.began_ns - first) * scale))
    return " " * begin + "\u2588" * max(1, round((span.ended_ns - span.began_ns) * scale))


def _notes(span: ReadSpan) -> str:
    summed = span.name in (spans.GENERATE, spans.RESUME, spans.ROUNDS_SUM)
    shown = dict.fromkeys((*TIMES, *NOTED) if summed else NOTED)
    notes = [f"{_label(key)} {value}" for key in shown if (value := _readable(key, span.attributes.get(key)))]
    return ", ".join([*notes, *(event.name for event in span.events if event.name != spans.OPENED)])


def _label(key: str) -> str:
    """A value has its unit beside it."""
    return key.partition(".")[2].removesuffix("_s")


def _readable(key: str, value: object) -> str:
    if key.endswith("_s") and isinstance(value, float):
        return f"{1e3 * value:.1f} ms" if value >= 5e-5 else ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if value else ""
