"""A role with everything that it could log on standard error: `python -m tests.loud MODULE`."""

from __future__ import annotations

import logging
import runpy
import sys

if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
