"""Logs: one line on standard error for each thing an operator must know. Numbers belong in metrics, times in spans.

Modules log with the standard library; this is how their records are written. No text of a session is ever logged: a
message names sessions, workers and settings, and tracebacks are written without the values of variables.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import structlog

from slipstream.errors import InvalidArgument
from slipstream.telemetry.tracing import current_trace_id

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "json", "text")


class Named(Protocol):
    """A session with an id."""

    @property
    def id(self) -> str: ...


def session_of(command: Any, known: Mapping[int, Named]) -> str:
    """The id of the session that a command on a stream between services is for; empty for an unknown session."""
    if command.HasField("open"):
        name: str = command.open.key.id
        return name
    session = known.get(command.session)
    return "" if session is None else session.id


def check(level: str, format: str) -> None:
    """Raises InvalidArgument for a level or format that `configure` does not have."""
    if level not in LEVELS:
        raise InvalidArgument(f"log_level={level!r}; choose one of {', '.join(LEVELS)}.")
    if format not in FORMATS:
        raise InvalidArgument(f"log_format={format!r}; choose one of {', '.join(FORMATS)}.")


def configure(role: str, level: str, format: str, stream: TextIO | None = None) -> None:
    """Configures logging of the whole process. `format`: `json`, `text`, or `auto`, which is text on a terminal."""
    stream = stream or sys.stderr
    text = format == "text" or (format == "auto" and stream.isatty())
    last: list[Processor] = [
        structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)
    ]
    if not text:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    first: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _Place(role),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=first, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)  # libraries log warnings only
    for name in ("slipstream", "gateway", "verifier_svc", "drafter_svc"):
        logging.getLogger(name).setLevel(level.upper())
    logging.captureWarnings(True)


class _Place:
    """Adds the role and the current trace id to each record."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        event["role"] = self._role
        if found := current_trace_id():
            event["trace_id"] = found
        return event
