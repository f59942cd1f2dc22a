"""The settings of a gateway, read from its environment (`GATEWAY_*`)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from gateway.routing.discovery import by_name
from gateway.routing.drafters import REPLICA
from gateway.routing.experiment import Experiment
from gateway.routing.experiment import parse as parse_experiment
from gateway.routing.rules import Rule, parse
from gateway.store.address import parse as parse_store
from gateway.text.answers.formats import CALL_FORMATS, THOUGHT_FORMATS
from slipstream.config import require_not_negative, require_positive
from slipstream.errors import InvalidArgument
from slipstream.telemetry.logs import check as check_logs

PREFIX = "GATEWAY_"
BODY_FACTOR = 6
"""Bytes of JSON for a byte of text, at most: `\\u0000`."""
BESIDES_BYTES = 1 << 20
"""Most bytes of a request besides its prompt and its prediction."""


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """One of `GATEWAY_DRAFTERS`."""

    name: str
    target: str
    """HOST:PORT, or `dns:///HOST:PORT`."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    verifiers: tuple[str, ...]
    """HOST:PORT of each, `dns:///HOST:PORT` (a verifier at each address of the name) or `file:///PATH` (an address a
    line)."""
    tokenizer: str
    """A local folder, a GGUF file or a hub id (`owner/name@REVISION`), with the vocabulary of the verifiers' model."""
    chat_template: str = ""
    """A chat template: a Jinja file, the name of one of the model's, or a shipped one: `alpaca`, `chatml`, `llama2`,
    `llama3`, `vicuna`, `zephyr`. Empty: those beside the tokenizer, if any."""
    listen: str = "127.0.0.1:50051"
    """HOST:PORT to serve at; port 0 picks a free one."""
    http: str = "off"
    """HOST:PORT of the HTTP API, or `off`."""
    http_idle_s: float = 30.0
    """Seconds that an HTTP client has to send a request, and to take each write."""
    http_origins: tuple[str, ...] = ()
    """Origins of web pages that browsers may let use the HTTP API (CORS); `*` for all."""
    http_hosts: tuple[str, ...] = ()
    """Further names in `Host` that a gateway without keys on a loopback address answers to, such as
    `host.docker.internal`; `*` for all."""
    model_aliases: tuple[str, ...] = ()
    """Further names of models, as ALIAS=MODEL (ALIAS alone for the only model). Answers name the model."""
    tool_calls: str = "auto"
    """Format of the model's tool calls: `hermes`, `llama3_json`, `pythonic`, `mistral`, `mistral_args`, `qwen3_coder`,
    `deepseek_v3`, `deepseek_v31`, `kimi_k2`, `glm45`, `harmony`; `auto`: by the chat template."""
    reasoning: str = "auto"
    """Marks around the model's reasoning: `think` (`<think>`), `mistral` (`[THINK]`), `seed` (`<seed:think>`),
    `harmony` (gpt-oss's channels), `none`; `auto`: by the chat template."""
    generation_config: str = "auto"
    """Sampling parameters that a request leaves out: `auto` takes temperature, top_k, top_p, min_p and
    repetition_penalty from `generation_config.json` beside the tokenizer; `none`: temperature 1, all else off."""
    health_listen: str = ""
    """HOST:PORT for health checks alone, in plaintext without certificates; empty: `listen` answers them."""
    tls_folder: str = ""
    """Folder of the tls.crt and tls.key that clients see; empty: those of `SLIPSTREAM_TLS_FOLDER`, if any."""
    api_keys: str = ""
    """A file of hashed API keys (`gateway.auth.api_keys`); empty: no key is needed."""
    failed_keys_per_minute: int = 60
    """Wrong API keys that one address may try; 0: no limit."""
    drafters: tuple[str, ...] = ()
    """NAME=HOST:PORT of each, NAME=dns:///HOST:PORT, NAME=file:///PATH, or NAME=verifier:METHOD for one inside the
    verifiers (`VERIFIER_LOCAL_DRAFTERS`). All of one name are replicas."""
    discovery_s: float = 2.0
    """Seconds between two readings of a `dns:///` name or a file."""
    trusted_drafters: tuple[str, ...] = ()
    """Drafters whose distribution q is trusted; the rule `rejection` needs one."""
    store: str = "memory"
    """`memory`, or the address of a Redis: see `gateway.store.address`."""
    memory_store_bytes: int = 1 << 30
    """Most bytes of records in the store `memory`; the eldest ended sessions are dropped first."""
    store_sentinel_password: str = ""
    """Password of the sentinels, if they need one."""
    store_replicas: int = 0
    """Replicas that must have a write before it is done."""
    store_eviction: str = "warn"
    """With a Redis that drops sessions when its memory is full: `warn` logs, `refuse` ends the gateway at its start."""
    durability: str = "strict"
    """`strict`: a token is in the log before it is sent. `relaxed`: it is sent first; the log follows in order."""
    session_ttl_s: float = 3600.0
    """Seconds that a session's record is kept after its last write or lease renewal."""
    lease_s: float = 10.0
    """Seconds after the last renewal when another gateway may take a session over; renewed three times as often."""
    store_grace_s: float = 5.0
    """Seconds that a session, or a request for one, waits for a store that went away."""
    max_sessions: int = 1024
    """Most open sessions; more are refused. One API key has at most seven for each free one."""
    max_tokens_default: int = 0
    """Most output tokens of a request without `max_tokens`; 0: what the model's length leaves, 16 of
    `/v1/completions`."""
    max_draft_tokens: int = 8
    """Most draft tokens verified in one round; a request may ask for fewer. 0: no speculation."""
    credit_tokens: int = 512
    """Output tokens that a verifier may be ahead of the client."""
    rules: str = ""
    """Requests that speculate, their drafters and draft lengths: see `gateway.routing.rules`."""
    experiment: str = ""
    """Split of sessions that name no drafter between drafters: see `gateway.routing.experiment`."""
    experiment_name: str = "experiment"
    """Sessions are assigned to arms by a hash of this name and their id."""
    max_prompt_bytes: int = 1_048_576
    """Most bytes of a prompt's text, and of a prediction's."""
    text_processes: int = 2
    """Processes that read long texts and large bodies at a time; one tenant has all but one of them."""
    max_stop_strings: int = 16
    """Most stop strings of one request."""
    max_stop_bytes: int = 1024
    """Most bytes of one stop string."""
    max_stop_tokens: int = 64
    """Most stop tokens of one request."""
    rehomings: int = 3
    """Times a session is opened again after a loss before it fails. A broken stream counts once, divided among its
    sessions that had no round yet."""
    rehoming_wait_s: float = 10.0
    """Seconds that a session, or a request for one, waits for a verifier."""
    mixed_arithmetic: str = "refuse"
    """When no verifier is left for a session's arithmetic: `refuse` ends it with ARITHMETIC_GONE, to be resumed;
    `mark` continues with another one, and marks the text. Requests may say otherwise."""
    stall_s: float = 30.0
    """Seconds without a step after which a session leaves its verifier."""
    breaker_window_s: float = 30.0
    """Seconds within which a drafter's failures add up and open its breaker."""
    breaker_cool_down_s: float = 1.0
    """Seconds until one session may try a drafter with an open breaker; doubled by each failed try."""
    breaker_longest_cool_down_s: float = 60.0
    """Most seconds of that doubling."""
    least_priority: int = 0
    """The lowest `priority` that a request may have; lower numbers are served first."""
    grace_s: float = 20.0
    """Seconds that running sessions have after SIGTERM."""
    alone: bool = False
    """True: no other gateway continues sessions when this one ends; clients receive that, and do not resume."""
    metrics_listen: str = ""
    """HOST:PORT of `/metrics`, in plaintext; empty: none."""
    metric_workloads: tuple[str, ...] = ()
    """Workload labels with metrics of their own; none: the first 16 that arrive. Others count as `other`."""
    slo_ttft_s: float = 0.0
    """Objective for the time to first token; 0: none."""
    slo_tpot_s: float = 0.0
    """Objective for the time per output token; 0: none."""
    slow_request_s: float = 60.0
    """A request that took more seconds is logged; 0: none is."""
    verifier_price: float = 0.0
    """Price of a verifier per hour, in any currency."""
    drafter_prices: tuple[str, ...] = ()
    """NAME=PRICE of drafters per hour."""
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
        self._check_choices()
        self.parsed_aliases()
        self._check_store()
        self._check_drafters()
        check_logs(self.log_level, self.log_format)

    def _check_choices(self) -> None:
        choices = {
            "durability": ("strict", "relaxed"),
            "store_eviction": ("warn", "refuse"),
            "mixed_arithmetic": ("refuse", "mark"),
            "tool_calls": CALL_FORMATS,
            "reasoning": THOUGHT_FORMATS,
            "generation_config": ("auto", "none"),
        }
        for name, known in choices.items():
            if (given := getattr(self, name)) not in known:
                listed = " or ".join(known) if len(known) == 2 else f"one of {', '.join(known)}"
                raise InvalidArgument(f"{PREFIX}{name.upper()}={given!r}; choose {listed}.")

    def parsed_rules(self) -> tuple[Rule, ...]:
        """Raises InvalidArgument that names the rule and what is wrong with it."""
        rules = parse(self.rules, self._drafter_names)
        if not self.api_keys and (rule := next((each for each in rules if each.key is not None), None)):
            raise InvalidArgument(
                f"GATEWAY_RULES has {str(rule)!r}, and no key opens this gateway: set GATEWAY_API_KEYS."
            )
        return rules

    def parsed_aliases(self) -> dict[str, str]:
        """Model by alias; an empty name for the only one. Raises InvalidArgument for a setting that cannot be read."""
        found = [re.fullmatch(r"\s*([^=\s][^=]*?)\s*(?:=\s*(\S.*))?", alias) for alias in self.model_aliases]
        if not all(found):
            raise InvalidArgument(
                f"GATEWAY_MODEL_ALIASES={','.join(self.model_aliases)!r}; write ALIAS=MODEL, or ALIAS alone."
            )
        return {pair[1]: pair[2] or "" for pair in found if pair}

    def parsed_experiment(self) -> Experiment | None:
        """Raises InvalidArgument that names the arm and what is wrong with it."""
        return parse_experiment(self.experiment_name, self.experiment, self._drafter_names)

    @property
    def renewal_s(self) -> float:
        """Seconds between two renewals of a lease: two may fail before it lapses."""
        return self.lease_s / 3

    @property
    def entries(self) -> tuple[DrafterEntry, ...]:
        """The `drafters`, parsed."""
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
        require_positive(self, PREFIX, "discovery_s", "store_grace_s", "rehoming_wait_s", "stall_s", "http_idle_s")
        require_positive(self, PREFIX, "max_sessions", "credit_tokens", "max_prompt_bytes")
        require_positive(self, PREFIX, "text_processes")
        require_positive(self, PREFIX, "breaker_window_s", "breaker_cool_down_s", "memory_store_bytes")
        require_not_negative(self, PREFIX, "failed_keys_per_minute", "max_draft_tokens", "rehomings", "grace_s")
        require_not_negative(self, PREFIX, "max_tokens_default")
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
