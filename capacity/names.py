"""Names in a plan's file that there are not."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from slipstream.errors import InvalidArgument


def refuse_unknown(where: str, given: Collection[str], known: Collection[str]) -> None:
    """Raises InvalidArgument for names of `given` that are not `known`, each with the one that may be meant."""
    if unknown := sorted(set(given) - set(known)):
        raise InvalidArgument(
            f"{where} knows no {', '.join(suggested(name, known) for name in unknown)}; "
            f"it has {', '.join(sorted(known))}."
        )


def suggested(name: str, known: Collection[str]) -> str:
    """The unknown name, with the known one that may be meant: one that it begins, then one that begins it."""
    lower = name.lower()
    longer = sorted((each for each in known if each.lower().startswith(lower)), key=len)
    shorter = sorted((each for each in known if lower.startswith(each.lower())), key=len, reverse=True)
    near = longer or shorter or difflib.get_close_matches(name, known, 1)
    return f"{name} (do you mean {near[0]}?)" if near else name
