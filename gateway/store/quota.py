"""The contract of a count that all gateways share of what each API key uses."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Demand(NamedTuple):
    """Charge to a key, with the gateway's sum of charges to it, and the key's limits (0: without limit)."""

    requests: int = 0
    tokens: int = 0
    sessions: int = 0
    all_requests: int = 0
    """Requests ever charged here and not given back, this demand included; so that a charge which was lost, or was
    carried out unseen, is made good by the next one."""
    all_tokens: int = 0
    all_sessions: int = 0
    """Sessions that run here, with this demand's."""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    most_sessions: int = 0


class SharedQuota(Protocol):
    async def charge(self, key: str, demand: Demand) -> tuple[str, float]:
        """Charge all of the demand, or nothing. Returns the name of the limit that refused it (`requests`, `tokens` or
        `sessions`; empty: charged) and the seconds until it fits. Raises Unavailable, and then the demand may have been
        charged or not, or may still be: until the next one for this key. One at a time for each key."""
