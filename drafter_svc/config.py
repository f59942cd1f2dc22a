"""Settings of a drafter from its environment (`DRAFTER_*`)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from slipstream.config import require_not_negative, require_positive
from slipstream.errors import InvalidArgument
from slipstream.proposers.base import ProposerSettings
from slipstream.proposers.registry import find_method
from slipstream.speculation.draft_distribution import MAX_TOKENS
from slipstream.telemetry import logs
from slipstream.tokenizer.vocabulary import EMULATED

PREFIX = "DRAFTER_"
ENGINES = ("embedded", "vllm")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    model: str = ""
    """For the method `model`: a local folder, a GGUF file, a hub id (`owner/name@REVISION`), or `emulated:` with
    settings (`slipstream.engine.factory`)."""
    engine: str = "embedded"
    """Engine of the draft model: `embedded` (this project's) or `vllm` (in this process, on one GPU; docs/gpu.md)."""
    vllm_args: str = ""
    """For `vllm`: further options of `vllm serve`, as `--quantization fp8`."""
    method: str = "model"
    """The drafting method, a name in `slipstream.proposers.registry`."""
    translate_for: str = ""
    """Where the draft model has another tokenizer: folder or hub id of the target's."""
    listen: str = "127.0.0.1:50061"
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
    kv_tokens: int = 65_536
    """Tokens of all sessions that the KV cache holds."""
    max_sessions: int = 1024
    """Most open sessions; more are refused. One API key has at most seven for each free one."""
    max_nodes: int = 128
    """Most nodes ahead of one session's committed prefix."""
    width: int = 4
    """Nodes proposed below one node: the likeliest token, then what may replace it."""
    sharpness: float = 1.5
    """Power on the draft model's probabilities in the confidence of candidates; measured acceptance corrects the
    rest."""
    expand: int = 0
    """Nodes of a session expanded in one step. 0: 4, or 8 or 16 where passes timed at the start hardly take longer."""
    step_tokens: int = 512
    """Most tokens of one forward pass."""
    corpus_tokens: int = 0
    """For `suffix`: tokens of output kept for each cache salt, from which later sessions of that salt are drafted; 0:
    none. About 120 bytes each."""
    corpus_salts: int = 16
    """Salts that have a corpus at a time; the longest unused goes first."""
    corpus_shared: bool = False
    """True: one corpus for all sessions, whatever their salt. Clients then see as speed what others wrote. False:
    sessions without a salt share nothing."""
    proposal_tokens: int = 32
    """Most tokens of the distribution q that is sent with each candidate under the rule `rejection`."""
    grace_s: float = 5.0
    """Seconds that sessions may stay after SIGTERM until gateways have moved them."""
    metrics_listen: str = ""
    """HOST:PORT of `/metrics`, in plaintext; empty: none."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    log_format: str = "auto"
    """`json`, `text`, or `auto`: text on a terminal, else JSON."""

    def __post_init__(self) -> None:
        logs.check(self.log_level, self.log_format)
        method = find_method(self.method)
        if method.in_verifier_only:
            raise InvalidArgument(
                f"DRAFTER_METHOD={self.method!r} takes part in the target's passes: it runs inside a verifier "
                f"(VERIFIER_LOCAL_DRAFTERS={self.method}{'=FOLDER' if method.needs_model else ''})."
            )
        if method.needs_model and not self.model:
            raise InvalidArgument("DRAFTER_MODEL is not set; name a folder or hub id, or another DRAFTER_METHOD.")
        self._check_engine()
        if not method.needs_model and self.translate_for:
            raise InvalidArgument(
                f"DRAFTER_TRANSLATE_FOR does not apply to the method {self.method!r}; leave it unset."
            )
        require_positive(self, PREFIX, "kv_tokens", "max_sessions", "max_nodes", "width", "sharpness")
        require_positive(self, PREFIX, "step_tokens", "proposal_tokens", "corpus_salts")
        require_not_negative(self, PREFIX, "threads", "grace_s", "expand")
        if self.proposal_tokens > MAX_TOKENS:
            raise InvalidArgument(f"DRAFTER_PROPOSAL_TOKENS={self.proposal_tokens}; give at most {MAX_TOKENS}.")
        if self.corpus_tokens < 0 or self.corpus_tokens == 1:
            raise InvalidArgument(f"DRAFTER_CORPUS_TOKENS={self.corpus_tokens}; give 0 for none, or at least 2.")

    def _check_engine(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidArgument(f"DRAFTER_ENGINE={self.engine!r}; choose one of {', '.join(ENGINES)}.")
        if self.engine == "vllm":
            self._check_vllm()
        elif self.vllm_args:
            raise InvalidArgument("DRAFTER_VLLM_ARGS needs DRAFTER_ENGINE=vllm.")

    def _check_vllm(self) -> None:
        if self.method != "model":
            raise InvalidArgument(f"DRAFTER_ENGINE=vllm runs a draft model; the method {self.method!r} has none.")
        if self.model.startswith(f"{EMULATED}:"):
            raise InvalidArgument(f"{self.model} has no weights; use DRAFTER_ENGINE=embedded.")
        if self.translate_for:
            raise InvalidArgument("DRAFTER_TRANSLATE_FOR needs trees of draft tokens; use DRAFTER_ENGINE=embedded.")
        if self.device not in ("auto", "cuda"):
            raise InvalidArgument(
                f"DRAFTER_DEVICE={self.device} is for the embedded engine; vLLM takes the first GPU of "
                "CUDA_VISIBLE_DEVICES."
            )
        if self.expand > 1:
            raise InvalidArgument(f"DRAFTER_EXPAND={self.expand}; vLLM proposes chains, from one node in a step.")

    def proposer_settings(self) -> ProposerSettings:
        names = (field.name for field in fields(ProposerSettings) if field.name not in ("target", "lookahead"))
        return ProposerSettings(**{name: getattr(self, name) for name in names})
