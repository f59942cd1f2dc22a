"""A problem that lasts is logged once. Imports nothing, so that clients may use it."""

from __future__ import annotations

import logging


class LogOnce:
    """A problem that is checked again and again, for example by every call that it affects, and logged once."""

    def __init__(self, log: logging.Logger, level: int) -> None:
        self._log = log
        self._level = level
        self._logged = ""

    def log_problem(self, sentence: str) -> None:
        """Logs the sentence unless it was the last one and the problem has lasted since."""
        if sentence != self._logged:
            self._log.log(self._level, "%s", sentence)
        self._logged = sentence

    def log_recovery(self, sentence: str = "") -> None:
        """Ends the problem; logs the sentence, if one is given, where there was a problem."""
        if self._logged and sentence:
            self._log.info("%s", sentence)
        self._logged = ""
