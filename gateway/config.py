"""What a gateway reads from its environment (`GATEWAY_*`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.routing.discovery import by_name
from gateway.routing.drafters import REPLICA
from gateway.routing.experiment import Experiment
from gateway.routing.experiment import parse as parse_experiment
from gateway.routing.rules import Rule, parse
from gateway.store.address import parse as parse_store
from slipstream.config import require_not_negative, require_positive
from slipstream.errors import InvalidArgument
from slipstream.telemetry.logs import check as check_logs

PREFIX = "GATEWAY_"


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """One of `GATEWAY_DRAFTERS`."""

    name: str
    target: str
    """HOST:PORT, or `dns:///HOST:PORT`."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    verifiers: tuple[str, ...]
    """HOST:PORT of each, or `dns:///HOST:PORT` for one at every address of the name, as of a headless Service."""
    tokenizer: str
    """A local folder or a hub id; the same vocabulary as the verifiers' model."""
    listen: str = "127.0.0.1:50051"
    """HOST:PORT to serve at; port 0 picks a free one."""
    health_listen: str = ""
    """HOST:PORT in plaintext for health checks alone, whose senders have no certificate; empty: only with the rest."""
    tls_folder: str = ""
    """tls.crt and tls.key that clients see; empty: the service's own (`SLIPSTREAM_TLS_FOLDER`), if there are any."""
    api_keys: str = ""
    """A file of hashed API keys (`gateway.auth.api_keys`); empty: whoever reaches the port may use it."""
    failed_keys_per_minute: int = 60
    """Wrong API keys that one address may try; 0 is without limit."""
    drafters: tuple[str, ...] = ()
    """NAME=HOST:PORT of each, NAME=dns:///HOST:PORT, or NAME=verifier:METHOD for one that runs inside the verifiers
    (`VERIFIER_LOCAL_DRAFTERS`). All of one name are replicas to requests."""
    discovery_s: float = 2.0
    """How often the names of `dns:///` are looked up."""
    trusted_drafters: tuple[str, ...] = ()
    """Names of drafters whose q is believed; the ratio rules need one."""
    store: str = "memory"
    """`memory`, or where Redis is: see `gateway.store.address`."""
    store_sentinel_password: str = ""
    """Of the sentinels, where they ask for one."""
    store_replicas: int = 0
    """Replicas that must have a write before it is done: what one failover then cannot lose."""
    durability: str = "strict"
    """`strict`: a token shown is in the log first. `relaxed`: shown first, the log follows in order."""
    session_ttl_s: float = 3600.0
    """How long the record of a session stays that nobody runs, for whoever resumes it or rolls it back."""
    lease_s: float = 10.0
    """After so long without a sign of life of its gateway a session may be taken over; renewed three times as often."""
    store_grace_s: float = 5.0
    """How long a session waits for a store that is away before it fails."""
    max_sessions: int = 1024
    """Most sessions that run here at a time; more are refused."""
    max_tokens_default: int = 256
    """Most output tokens of a request that does not say."""
    max_draft_tokens: int = 8
    """Most candidates verified in one round; a request may ask for fewer. 0: nobody speculates."""
    credit_tokens: int = 512
    """Output tokens a verifier may be ahead of a session's client."""
    rules: str = ""
    """Which requests speculate, with whom and how far, by workload, salt and lengths: see `gateway.routing.rules`."""
    experiment: str = ""
    """How sessions that leave the choice to the server are split between drafters, by weight: see
    `gateway.routing.experiment`."""
    experiment_name: str = "experiment"
    """Another name deals the sessions anew."""
    max_prompt_bytes: int = 1_048_576
    """Of a prompt's text, and of a prediction's."""
    max_stop_strings: int = 16
    """Most of one request."""
    max_stop_bytes: int = 64
    """Of one stop string."""
    max_stop_tokens: int = 64
    """Most stop tokens of one request."""
    rehomings: int = 3
    """Times a session is opened again after a loss before it fails."""
    rehoming_wait_s: float = 10.0
    """How long a session waits for a verifier."""
    stall_s: float = 30.0
    """A verifier that takes no step for so long while a session waits on it is given up."""
    breaker_window_s: float = 30.0
    """Failures of a drafter within this time add up; enough of them, and sessions are no longer given to it."""
    breaker_cool_down_s: float = 1.0
    """Until one session may try it again; doubled by every failed try, up to the longest."""
    breaker_longest_cool_down_s: float = 60.0
    """The longest such pause."""
    least_priority: int = 0
    """The lowest `priority` that a request may claim: below 0 it would come before all those that claim nothing."""
    grace_s: float = 20.0
    """How long running sessions may go on after SIGTERM."""
    metrics_listen: str = ""
    """HOST:PORT of `/metrics`, in plaintext; empty: none."""
    metric_workloads: tuple[str, ...] = ()
    """Workload labels that metrics tell apart; none: the first 16 that come. All others are `other`."""
    slo_ttft_s: float = 0.0
    """What a good request keeps to, until its first token; 0: nothing is asked."""
    slo_tpot_s: float = 0.0
    """The same for each of its other tokens."""
    slow_request_s: float = 60.0
    """A request that took longer is told of in the log; 0: none is."""
    verifier_price: float = 0.0
    """Of each verifier, an hour, in whatever currency."""
    drafter_prices: tuple[str, ...] = ()
    """NAME=PRICE of drafters, an hour."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    log_format: str = "auto"
    """`json`, `text`, or `auto`: text on a terminal, else JSON."""

    def __post_init__(self) -> None:
        if not self.verifiers:
            raise InvalidArgument("GATEWAY_VERIFIERS names no verifier; give HOST:PORT,....")
        for verifier in self.verifiers:
            by_name(verifier, "GATEWAY_VERIFIERS")  # raises for half a name
        self._check_numbers()
        if self.durability not in ("strict", "relaxed"):
            raise InvalidArgument(f"GATEWAY_DURABILITY={self.durability!r}; choose strict or relaxed.")
        self._check_store()
        self._check_drafters()
        check_logs(self.log_level, self.log_format)

    def parsed_rules(self) -> tuple[Rule, ...]:
        """Raises InvalidArgument that names the rule and what is wrong with it."""
        return parse(self.rules, self._drafter_names)

    def parsed_experiment(self) -> Experiment | None:
        """Raises InvalidArgument that names the arm and what is wrong with it."""
        return parse_experiment(self.experiment_name, self.experiment, self._drafter_names)

    @property
    def renewal_s(self) -> float:
        """Between two renewals of a lease: two may fail before it lapses."""
        return self.lease_s / 3

    @property
    def entries(self) -> tuple[DrafterEntry, ...]:
        """The `drafters`, read."""
        return tuple(DrafterEntry(*_named(entry)) for entry in self.drafters)

    @property
    def _drafter_names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    def prices_of_drafters(self) -> dict[str, float]:
        """By name. Raises InvalidArgument for what is not NAME=PRICE, or names no drafter."""
        known, prices = self._drafter_names, dict[str, float]()
        for entry in self.drafter_prices:
            name, price = _named(entry)
            try:
                prices[name] = float(price)
            except ValueError:
                prices[name] = -1.0
            if name not in known or not 0.0 <= prices[name] < math.inf:
                raise InvalidArgument(f"GATEWAY_DRAFTER_PRICES holds {entry!r}; write NAME=PRICE of a known drafter.")
        return prices

    def _check_numbers(self) -> None:
        require_positive(self, PREFIX, "discovery_s", "store_grace_s", "rehoming_wait_s", "stall_s")
        require_positive(self, PREFIX, "max_sessions", "max_tokens_default", "credit_tokens", "max_prompt_bytes")
        require_positive(self, PREFIX, "breaker_window_s", "breaker_cool_down_s")
        require_not_negative(self, PREFIX, "failed_keys_per_minute", "max_draft_tokens", "rehomings", "grace_s")
        require_not_negative(self, PREFIX, "max_stop_strings", "max_stop_bytes", "max_stop_tokens")
        require_not_negative(self, PREFIX, "slo_ttft_s", "slo_tpot_s", "slow_request_s", "verifier_price")
        if not self.breaker_cool_down_s <= self.breaker_longest_cool_down_s:
            raise InvalidArgument("GATEWAY_BREAKER_COOL_DOWN_S is above GATEWAY_BREAKER_LONGEST_COOL_DOWN_S.")

    def _check_store(self) -> None:
        address = None if self.store == "memory" else parse_store(self.store)
        if self.store_replicas < 0 or (self.store_replicas and (address is None or address.cluster)):
            raise InvalidArgument("GATEWAY_STORE_REPLICAS is for a Redis that is not a cluster; 0 waits for none.")
        if not 0.0 < self.lease_s < self.session_ttl_s < math.inf:
            raise InvalidArgument("GATEWAY_LEASE_S must be above 0 and below GATEWAY_SESSION_TTL_S, which has an end.")

    def _check_drafters(self) -> None:
        for given, entry in zip(self.drafters, self.entries, strict=True):
            if not (entry.name and entry.target) or REPLICA in entry.name:
                raise InvalidArgument(f"GATEWAY_DRAFTERS holds {given!r}; write NAME=HOST:PORT, no {REPLICA} in it.")
            by_name(entry.target, "GATEWAY_DRAFTERS")
        if unknown := set(self.trusted_drafters) - set(self._drafter_names):
            raise InvalidArgument(f"GATEWAY_TRUSTED_DRAFTERS names {sorted(unknown)}, which GATEWAY_DRAFTERS does not.")
        self.parsed_rules()
        self.prices_of_drafters()
        self.parsed_experiment()


def _named(entry: str) -> tuple[str, str]:
    """NAME=WHAT; without the sign all of it is the name."""
    name, _, what = entry.partition("=")
    return name, what
