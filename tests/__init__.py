"""Tests, and what they share.

Threads of a process of tests sleep between their calls, as a role's do, and so do those of roles that are forked from
it: OpenMP reads that when torch is imported, which is later.
"""

from __future__ import annotations

import os

from slipstream.process import PATIENT_THREADS

for name, value in PATIENT_THREADS.items():
    os.environ.setdefault(name, value)
