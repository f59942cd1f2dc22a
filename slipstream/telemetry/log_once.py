"""What is wrong for long is told of once."""

from __future__ import annotations

import logging


class LogOnce:
    """A trouble that is looked at again and again, as by every call that it hinders."""

    def __init__(self, log: logging.Logger, level: int) -> None:
        self._log = log
        self._level = level
        self._said = ""

    def say(self, sentence: str) -> None:
        """Logged where the last one was another, or that one is over."""
        if sentence != self._said:
            self._log.log(self._level, "%s", sentence)
        self._said = sentence

    def over(self, sentence: str = "") -> None:
        """Logged, if it is given, where there was a trouble."""
        if self._said and sentence:
            self._log.info("%s", sentence)
        self._said = ""
