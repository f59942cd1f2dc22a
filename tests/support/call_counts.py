"""Counts what work costs in Python calls: a number that no other work on the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT_FOLDER = Path(__file__).parents[2]


def calls_of(function: Callable[[], object], *packages: str) -> int:
    """Python calls of these packages' own functions while `function` runs."""
    own = tuple(str(ROOT_FOLDER / package) for package in packages)
    count = 0

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(own)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
