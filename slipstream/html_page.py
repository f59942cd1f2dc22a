"""Reports as HTML pages that load nothing: tables, and lines drawn as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

Line = tuple[str, Sequence[tuple[float, float]]]
"""A name and points (x, y), by ascending x."""
COLOURS = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c", "#0891b2", "#6b7280", "#ca8a04")
WIDTH, HEIGHT = 560, 220
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{padding:.2rem .8rem;border-bottom:1px solid #d0d7de}
td,th{text-align:right}td:first-child,th:first-child{text-align:left}text{font-size:11px;fill:currentColor}
.yes,.no{padding:1rem;font-weight:600;border-left:.5rem solid #16a34a}.no{border-color:#dc2626}
code{word-break:break-all}@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}"""


def page(title: str, parts: Iterable[str]) -> str:
    """`parts`: HTML, below one another."""
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return "\n".join([head, *parts, "</html>\n"])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def chart(lines: Sequence[Line], unit: str) -> str:
    """Lines over one another, from 0 upwards. `unit`: of x."""
    points = [point for _, line in lines for point in line]
    if not points:
        return "<p>Nothing was measured.</p>"
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    top = max(max(y for _, y in points), 1e-9)

    def at(x: float, y: float) -> str:
        across = (x - left) / max(right - left, 1e-9)
        return f"{45 + across * (WIDTH - 60):.1f},{HEIGHT - 30 - y / top * (HEIGHT - 50):.1f}"

    parts = []
    for share in (0.0, 0.5, 1.0):
        x, y = at(left, share * top).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - 15}" y2="{y}" stroke="currentColor" opacity=".2"/>')
        parts.append(f'<text x="40" y="{y}" text-anchor="end">{share * top:.3g}</text>')
    for number, (name, line) in enumerate(lines):
        colour, drawn = COLOURS[number % len(COLOURS)], " ".join(at(*point) for point in line)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{60 + 110 * number}" y="10" style="fill:{colour}">{escape(name)}</text>')
    parts.append(f'<text x="45" y="{HEIGHT - 12}">{left:g}</text>')
    parts.append(f'<text x="{WIDTH - 15}" y="{HEIGHT - 12}" text-anchor="end">{right:g} {escape(unit)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'
