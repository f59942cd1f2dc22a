"""Labels that somebody else chooses: cleaned, and never more of them than a scrape can bear."""

from __future__ import annotations

from collections.abc import Iterable

OTHER = "other"
MOST_CHARACTERS = 64


class BoundedLabels:
    """The first `most` different values keep their name; all that come later are OTHER. With `known` ones only those
    do, so that nobody can take their places."""

    def __init__(self, most: int, known: Iterable[str] = ()) -> None:
        self._known = {value: clean(value) for value in known}
        self._most = len(self._known) or most

    def __call__(self, value: str) -> str:
        name = self._known.get(value)
        if name is None:
            if len(self._known) >= self._most:
                return OTHER
            name = self._known[value] = clean(value)
        return name


def clean(value: str) -> str:
    """Some parsers of scrapes take a NUL for the end of all, and nobody reads what cannot be printed."""
    return "".join(each if each.isprintable() else "?" for each in value[:MOST_CHARACTERS])
