"""Settings of a verifier, read from its environment (`VERIFIER_*`)."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import require_not_negative, require_positive
from slipstream.engine.model_info import MOST_CANDIDATES
from slipstream.errors import InvalidArgument
from slipstream.proposers.base import ProposerSettings
from slipstream.proposers.registry import METHODS
from slipstream.speculation.lookahead_window import LookaheadSize
from slipstream.telemetry import logs
from verifier_svc.address_allowlist import AddressAllowlist
from verifier_svc.wait_policy.draft_threshold import LEVELS

PREFIX = "VERIFIER_"
ENGINES = ("embedded", "vllm")
MAX_DRAFT_TOKENS = {"embedded": 32, "vllm": 8}
"""By engine: vLLM captures graphs for chains of up to so many, and verifies no trees."""
KV_TOKENS = 65_536
PROMPT_STEP_S = 0.1
"""Ten tokens a second: text still comes faster than it is read."""


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    model: str
    """A local folder, a GGUF file, a hub id (`owner/name@REVISION`), or `emulated:` with settings
    (`slipstream.engine.factory`)."""
    engine: str = "embedded"
    """Executor of the target: `embedded` (this project's engine) or `vllm` (vLLM's workers; docs/deployment.md)."""
    vllm_args: str = ""
    """For `vllm`: further options of `vllm serve`, as `--tensor-parallel-size 4 --quantization awq`."""
    vllm_speculator: str = ""
    """For `vllm`: its own speculator, the JSON of `--speculative-config`, as `{"method": "eagle3", "model": FOLDER,
    "num_speculative_tokens": 3}` (`eagle`, `eagle3`, `mtp`, `dflash`, `dspark`). Gateways name it
    `verifier:speculator`."""
    vllm_step_timeout_s: float = 30.0
    """For `vllm`: seconds without a worker's answer after which the verifier ends."""
    listen: str = "127.0.0.1:50071"
    """HOST:PORT to serve at; port 0 picks a free one."""
    health_listen: str = ""
    """HOST:PORT for health checks alone, in plaintext without certificates; empty: `listen` answers them."""
    dtype: str = "auto"
    """Type of weights and KV: `auto` (the checkpoint's own, or `float32` where this CPU
    would emulate that), `float32`, `bfloat16` or `float16`."""
    quantisation: str = ""
    """Quantisation of the weights: `int8`, `int4`, of drafts also `int8-dynamic`; empty: none."""
    lean: bool = True
    """Without the library's modelling code where `slipstream.engine.models.lean_selection` can; False: always with
    it."""
    device: str = "auto"
    """`auto` (the first GPU, else the CPU), `cpu`, `cuda` or `cuda:N`."""
    threads: int = 1
    """Threads of torch; 0: one for each core of this process (`slipstream.engine.cpu_cores`)."""
    kv_tokens: int | None = None
    """Tokens of all sessions that the KV cache holds; one session has at most as many. Unset: 65,536; with `vllm` on a
    GPU what its memory holds."""
    max_sessions: int = 1024
    """Most open sessions; more are refused. One API key has at most seven for each free one."""
    max_draft_tokens: int | None = None
    """Most candidates of a session in one step; 256 at most. Unset: 32; with `vllm` 8."""
    always_speculate: bool = False
    """True: steps wait for candidates and verify them even where that is slower. For tests."""
    step_tokens: int | None = None
    """Most tokens of one forward pass. Unset: 512; with `vllm` on a GPU vLLM's own."""
    prefill_tokens: int | None = None
    """Most prompt tokens of a pass while other sessions decode; fewer where they take longer than decoding. Unset: half
    of `step_tokens`."""
    prompt_step_s: float = PROMPT_STEP_S
    """Seconds that a pass with prompts may take beside sessions that decode, or twice a pass without if that is more;
    always the latter behind a gateway with API keys."""
    min_path_probability: float = LEVELS[0]
    """The lowest threshold that drafters are sent (`verifier_svc.wait_policy.draft_threshold`)."""
    max_wait_s: float = 0.25
    """Most seconds that a step waits for candidates."""
    measure_s: float = 3.0
    """Seconds at the start in which passes of all sizes are timed."""
    silence_s: float = 3.0
    """Seconds without a sign of life after which a drafter that owes a step is detached."""
    local_drafters: tuple[str, ...] = ()
    """Drafters inside the verifier: METHOD of each (`slipstream.proposers.registry`), `model=FOLDER` (or hub id) for a
    draft model, `medusa=FOLDER` or `eagle=FOLDER` for heads. Gateways name them `verifier:METHOD`."""
    min_head_accuracy: float = 0.05
    """Share of next tokens that heads must find at the start in the target's own texts (`medusa`: among its best ten);
    0: not tried."""
    draft_dtype: str = "auto"
    """Type of a draft model inside the verifier, like `dtype`."""
    draft_quantisation: str = ""
    """Quantisation of that draft model, like `quantisation`."""
    draft_kv_tokens: int = 65_536
    """Tokens of all sessions that the KV cache of that draft model holds."""
    draft_translate: bool = False
    """True: that draft model may have another tokenizer than the target."""
    corpus_tokens: int = 0
    """For `suffix`: tokens of output kept for each cache salt, from which later sessions of that salt are drafted; 0:
    none. About 120 bytes each."""
    corpus_shared: bool = False
    """True: one corpus for all sessions, whatever their salt. Clients then see as speed what others wrote. False:
    sessions without a salt share nothing."""
    lookahead: str = "4,3,3"
    """For `lookahead`: W,N,G of its paper: columns of the window, tokens of an n-gram, n-grams for a first token. The
    window takes (N-1)*W-1 of a session's `max_draft_tokens` that other candidates leave."""
    drafters_allowed: tuple[str, ...] = ()
    """HOST:PORT patterns (`verifier_svc.address_allowlist`) of the drafters that gateways may name; none:
    any address."""
    grace_s: float = 5.0
    """Seconds that running sessions have after SIGTERM; gateways then move them to other verifiers."""
    metrics_listen: str = ""
    """HOST:PORT of `/metrics`, in plaintext; empty: none."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    log_format: str = "auto"
    """`json`, `text`, or `auto`: text on a terminal, else JSON."""

    def __post_init__(self) -> None:
        self.local_methods()
        AddressAllowlist(self.drafters_allowed)  # raises for what cannot be read
        LookaheadSize.parse(self.lookahead)
        logs.check(self.log_level, self.log_format)
        require_positive(self, PREFIX, "silence_s", "kv_tokens", "max_sessions", "step_tokens", "prefill_tokens")
        require_positive(self, PREFIX, "draft_kv_tokens")
        require_not_negative(
            self, PREFIX, "threads", "max_draft_tokens", "min_path_probability", "max_wait_s", "min_head_accuracy"
        )
        require_not_negative(self, PREFIX, "measure_s", "grace_s", "prompt_step_s")
        require_positive(self, PREFIX, "vllm_step_timeout_s")
        if self.engine not in ENGINES:
            raise InvalidArgument(f"VERIFIER_ENGINE={self.engine!r}; choose one of {', '.join(ENGINES)}.")
        if self.most_draft_tokens > MOST_CANDIDATES:
            raise InvalidArgument(
                f"VERIFIER_MAX_DRAFT_TOKENS={self.max_draft_tokens}; a pass takes {MOST_CANDIDATES} candidates of a "
                "session at most."
            )
        if self.vllm_args and self.engine != "vllm":
            raise InvalidArgument("VERIFIER_VLLM_ARGS needs VERIFIER_ENGINE=vllm.")
        if self.vllm_speculator and self.engine != "vllm":
            raise InvalidArgument("VERIFIER_VLLM_SPECULATOR needs VERIFIER_ENGINE=vllm.")
        if self.min_path_probability > 1.0:
            raise InvalidArgument(
                f"VERIFIER_MIN_PATH_PROBABILITY={self.min_path_probability}; give a probability, 1 at most."
            )

    @property
    def most_draft_tokens(self) -> int:
        """`max_draft_tokens`, or the engine's."""
        return MAX_DRAFT_TOKENS[self.engine] if self.max_draft_tokens is None else self.max_draft_tokens

    def most_prefill_tokens(self, step_tokens: int) -> int:
        """`prefill_tokens`, or half of these."""
        return self.prefill_tokens or max(1, step_tokens // 2)

    def local_methods(self) -> dict[str, str]:
        """Methods that draft inside the verifier, each with its draft model or an empty string.

        Raises InvalidArgument for an entry that names no method, or a method without the model that it needs.
        """
        entries = {name: model for name, _, model in (entry.partition("=") for entry in self.local_drafters)}
        for name, model in entries.items():
            if name not in METHODS or METHODS[name].needs_model != bool(model):
                raise InvalidArgument(
                    f"VERIFIER_LOCAL_DRAFTERS holds {name!r}; write METHOD, or METHOD=FOLDER for a draft model, with "
                    f"one of {', '.join(METHODS)}."
                )
        return entries

    def proposer_settings(self, model: str) -> ProposerSettings:
        """Settings of a drafter inside the verifier, with this draft model."""
        return ProposerSettings(
            model=model,
            target=self.model,
            translate_for=self.model if self.draft_translate else "",
            dtype=self.draft_dtype,
            quantisation=self.draft_quantisation,
            lean=self.lean,
            device=self.device,
            kv_tokens=self.draft_kv_tokens,
            corpus_tokens=self.corpus_tokens,
            corpus_shared=self.corpus_shared,
            lookahead=self.lookahead,
        )
