"""The contract of a count that all gateways share of what each API key uses."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Demand(NamedTuple):
    """What is to be charged to a key, and the key's limits (0: without limit). Negative amounts are given back."""

    requests: int = 0
    tokens: int = 0
    sessions: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    most_sessions: int = 0


class SharedQuota(Protocol):
    async def charge(self, key: str, demand: Demand) -> tuple[str, float]:
        """Charge all of the demand, or nothing. Returns the name of the limit that refused it (`requests`, `tokens` or
        `sessions`; empty: charged) and the seconds until it fits. Raises Unavailable."""

    async def report_sessions(self, key: str, sessions: int) -> None:
        """Replace what is counted for this gateway's sessions of the key. Raises Unavailable."""
