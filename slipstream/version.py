"""The version of the installed distribution."""

from __future__ import annotations

from importlib.metadata import version

DISTRIBUTION = "slipstream-serve"


def running_version() -> str:
    """Version of the installed distribution, as in its metadata."""
    return version(DISTRIBUTION)
