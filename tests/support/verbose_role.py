"""A role with everything that it could log on standard error: `python -m tests.support.verbose_role MODULE`."""

from __future__ import annotations

import logging
import runpy
import sys

from slipstream.telemetry import logs

if __name__ == "__main__":
    configure = logs.configure

    def loudly(*settings: str) -> None:
        configure(*settings)
        logging.getLogger().setLevel(logging.DEBUG)  # of libraries too

    logs.configure = loudly  # type: ignore[assignment]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
