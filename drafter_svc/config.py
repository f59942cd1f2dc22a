"""What a drafter reads from its environment (`DRAFTER_*`)."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import require_positive
from slipstream.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    model: str = ""
    """For the method `model`: a local folder, a hub id, or `emulated:` with settings (`slipstream.engine.opening`)."""
    method: str = "model"
    """`model`, or without one: `ngram` (prompt lookup), `suffix` (suffix automaton)."""
    listen: str = "127.0.0.1:50061"
    dtype: str = "auto"
    threads: int = 1
    """Of torch; never sized from the machine, whose cores are shared."""
    kv_tokens: int = 65_536
    """Tokens of all sessions together that have room in the KV cache."""
    max_sessions: int = 1024
    max_nodes: int = 32
    """Most nodes ahead of one session's committed prefix, whatever its policy asks for."""
    width: int = 4
    """Guesses below one node: the likeliest token, then what may replace it."""
    expand: int = 4
    """Nodes of one session that are guessed on in one pass."""
    step_tokens: int = 512
    """Most tokens of one forward pass; longer prompts are prefilled over several."""
    corpus_tokens: int = 0
    """Of finished sessions, for `suffix`: what one client wrote then helps another, and shows to it as speed."""
    proposal_tokens: int = 32
    """Support of the honest sparse q that the ratio rules are sent."""
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        if self.method == "model" and not self.model:
            raise InvalidArgument("DRAFTER_MODEL is not set; name a folder or hub id, or another DRAFTER_METHOD.")
        require_positive(
            self, "threads", "kv_tokens", "max_sessions", "width", "expand", "step_tokens", "proposal_tokens"
        )
