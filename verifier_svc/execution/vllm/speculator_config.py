"""VERIFIER_VLLM_SPECULATOR: which of vLLM's own speculators drafts beside the target, as in `--speculative-config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slipstream.errors import InvalidArgument
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.vllm.messages import SpeculatorSettings

VARIABLE = "VERIFIER_VLLM_SPECULATOR"
METHODS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""Those of Model Runner V2 that read the target's hidden states, which no other process has."""
ELSEWHERE = {
    "medusa": "Model Runner V2 has no speculator for it; the embedded engine has (VERIFIER_LOCAL_DRAFTERS)",
    "mlp_speculator": "Model Runner V2 has no speculator for it",
    "draft_model": "a draft model runs in a drafter (DRAFTER_MODEL, DRAFTER_ENGINE=vllm)",
    "ngram": "lookups need no model: VERIFIER_LOCAL_DRAFTERS=suffix",
    "ngram_gpu": "lookups need no model: VERIFIER_LOCAL_DRAFTERS=suffix",
    "suffix": "lookups need no model: VERIFIER_LOCAL_DRAFTERS=suffix",
    "custom_class": "its code would be run from a setting",
    "extract_hidden_states": "it drafts nothing",
}
"""vLLM's other methods, and why they are refused."""
KEYS = (
    "method", "model", "revision", "num_speculative_tokens", "quantization", "draft_tensor_parallel_size",
    "max_model_len", "attention_backend", "kv_cache_dtype", "moe_backend",
)  # fmt: skip
"""Keys of vLLM's that may be set: acceptance, draft sampling and the length of a step's chains are Slipstream's."""


def speculator_of(config: VerifierConfig) -> dict[str, Any] | None:
    """vLLM's speculative config; None where there is no speculator. Raises InvalidArgument for one that cannot be read,
    and for a method that is not served, with the reason."""
    if not config.vllm_speculator:
        return None
    try:
        given = json.loads(config.vllm_speculator)
    except ValueError as error:
        raise InvalidArgument(f"{VARIABLE} is no JSON: {error}.") from error
    if not isinstance(given, dict):
        raise InvalidArgument(f"{VARIABLE} must be a JSON object, as vLLM's --speculative-config.")
    method = given.get("method")
    if method not in METHODS:
        why = ELSEWHERE.get(str(method), "no such method is known")
        raise InvalidArgument(f"{VARIABLE} names the method {method!r}: {why}. Choose one of {', '.join(METHODS)}.")
    if unknown := sorted(given.keys() - set(KEYS)):
        raise InvalidArgument(f"{VARIABLE} holds {', '.join(unknown)}; what can be set is {', '.join(KEYS)}.")
    depth = given.get("num_speculative_tokens")
    if type(depth) is not int or not 0 < depth <= config.most_draft_tokens:
        raise InvalidArgument(
            f"{VARIABLE}: num_speculative_tokens must be a number from 1 to {config.most_draft_tokens} "
            "(VERIFIER_MAX_DRAFT_TOKENS)."
        )
    return given


def settings_of(speculation: Any, given: Mapping[str, Any] | None) -> SpeculatorSettings | None:
    """`speculation`: vLLM's SpeculativeConfig of what was given."""
    if given is None:
        return None
    return SpeculatorSettings(
        speculation.num_speculative_tokens, in_one_pass=speculation.use_dflash() or speculation.use_dspark()
    )
