"""The parts that all sessions of a gateway share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.config import GatewayConfig
from gateway.requests.validation import RandomBits
from gateway.routing.router import Router
from gateway.sessions.observer import Observers


@dataclass(frozen=True, slots=True)
class GatewayContext:
    config: GatewayConfig
    router: Router
    random_bits: RandomBits
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    observers: Observers = field(default_factory=Observers)
