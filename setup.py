"""What pyproject.toml cannot say: with SLIPSTREAM_COMPILE=1 mypyc compiles the inner loops of a verifier's step.

They are the same files, so a compiled module hides later changes of its source: this is for wheels and images, not for
a checkout that is worked on. `make test-compiled` tests them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from setuptools import setup

MODULES = (
    "slipstream/speculation/candidate_tree.py",
    "slipstream/speculation/node.py",
    "slipstream/speculation/selection.py",
    "verifier_svc/acceptance/coupled.py",
    "verifier_svc/estimators/calibration.py",
)
COMPILE = os.environ.get("SLIPSTREAM_COMPILE") == "1"


def compiled() -> list[Any]:
    try:
        from mypyc.build import mypycify
    except ImportError:
        if "egg_info" in sys.argv:  # first pip asks what the build requires
            return []
        raise
    options = ("--config-file=", "--ignore-missing-imports", "--follow-imports=skip")
    return mypycify([*MODULES, *options], opt_level="2", group_name="slipstream")


setup(setup_requires=["mypy>=2.4"] if COMPILE else [], ext_modules=compiled() if COMPILE else [])
