"""Faults that were mended while tests ran, in this process and in those that are forked from it.

A verifier runs a failed step again in parts, and a session that lost its drafter goes on without: texts are right, and
without this no test would notice that something of ours is broken.
"""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
from pathlib import Path

from gateway.routing import verifiers
from slipstream.speculation.frame import PROTOCOL
from verifier_svc.execution import fault_isolation


class MendedFaults(logging.Handler):
    """Appends each fault to a file, which forked processes share."""

    def __init__(self) -> None:
        super().__init__()
        descriptor, name = tempfile.mkstemp(prefix="mended-faults-")
        os.close(descriptor)
        self._file, self._owner = Path(name), os.getpid()
        atexit.register(self._remove)

    def filter(self, record: logging.LogRecord) -> bool:
        """Failed steps, and drafters that sent what no correct one sends; others are lost with their processes."""
        return record.name == fault_isolation.log.name or PROTOCOL in (record.args or ())

    def emit(self, record: logging.LogRecord) -> None:
        fault = f": {record.exc_info[1]!r}" if record.exc_info else ""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{record.getMessage()}{fault}\n")

    def take(self) -> list[str]:
        """Those since this was last asked."""
        if not self._file.stat().st_size:
            return []
        found = self._file.read_text("utf-8").splitlines()
        self._file.write_bytes(b"")
        return found

    def _remove(self) -> None:
        if os.getpid() == self._owner:
            self._file.unlink(missing_ok=True)


FAULTS = MendedFaults()
for logger in (fault_isolation.log, verifiers.log):
    logger.addHandler(FAULTS)
