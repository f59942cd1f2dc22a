"""Checks of an Open and of its drafters, before the verifier does any work for them."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import (
    BAD_COMMAND,
    KV_TOO_SMALL,
    NUMBER_OUT_OF_RANGE,
    TOO_MANY_ITEMS,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
)
from slipstream.rpc import proto_conversion
from slipstream.speculation.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from slipstream.v1 import types_pb2, verifier_pb2
from verifier_svc.address_allowlist import AddressAllowlist

MAX_STOP_TOKENS = 4096
"""Stop tokens of one session: the client's and the model's own."""
MAX_DRAFTERS = 16
"""Drafters of one session."""
MAX_ADDRESS_CHARACTERS = 261
"""253 of a host name, and a port."""


def check_open(request: verifier_pb2.DecodeOpen, epoch: int, model: types_pb2.ModelInfo) -> None:
    """Raises InvalidArgument for an Open that this model can never serve."""
    if request.key.epoch != epoch or epoch < 1:
        raise InvalidArgument("the key's epoch must be the command's, and epochs start at 1.", reason=BAD_COMMAND)
    if not 1 <= len(request.key.id) <= proto_conversion.MAX_ID_CHARACTERS:
        raise InvalidArgument(
            f"a session id has 1 to {proto_conversion.MAX_ID_CHARACTERS} characters.", reason="LABEL_TOO_LONG"
        )
    labels = (request.workload, request.cache_salt, request.tenant)
    if max(len(label.encode()) for label in labels) > proto_conversion.MAX_LABEL_BYTES:
        most = proto_conversion.MAX_LABEL_BYTES
        raise InvalidArgument(
            f"workload, cache_salt and tenant have at most {most} bytes each.", reason="LABEL_TOO_LONG"
        )
    proto_conversion.check_sizes(request.sampling)
    if len(request.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidArgument(f"a session has at most {MAX_STOP_TOKENS} stop tokens.", reason=TOO_MANY_ITEMS)
    _check_tokens(request, model)
    structured = request.structured_output.WhichOneof("format") is not None
    if structured and not set(model.eos_token_ids) <= set(request.stop_token_ids):
        raise InvalidArgument(
            "a structured output ends with an end-of-text token; name all of the model's as stop tokens.",
            reason="ENDLESS_GRAMMAR",
        )
    if request.min_length > request.max_length or (structured and request.min_length):
        raise InvalidArgument(
            "min_length is at most max_length, and not for a structured output.", reason=NUMBER_OUT_OF_RANGE
        )
    proto_conversion.check_reasoning_limit(request)
    if request.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidArgument(f"top_logprobs is at most {MAX_TOP_LOGPROBS}.", reason=NUMBER_OUT_OF_RANGE)


def check_drafters(drafters: Sequence[verifier_pb2.DrafterAddress], allowed: AddressAllowlist) -> None:
    """Raises InvalidArgument, or PermissionDenied for an address that is not allowed. Called before any is dialled."""
    if len(drafters) > MAX_DRAFTERS:
        raise InvalidArgument(f"a session has at most {MAX_DRAFTERS} drafters.", reason=TOO_MANY_ITEMS)
    for drafter in drafters:
        if len(drafter.address) > MAX_ADDRESS_CHARACTERS or len(drafter.name) > MAX_ADDRESS_CHARACTERS:
            raise InvalidArgument(
                f"a drafter's address and name have at most {MAX_ADDRESS_CHARACTERS} characters.",
                reason="LABEL_TOO_LONG",
            )
        allowed.check(drafter.address)


def check_room(max_length: int, kv_tokens: int) -> None:
    """Raises ResourceExhausted for a session that may become longer than the whole KV cache: waiting would not help."""
    if max_length > kv_tokens:
        raise ResourceExhausted(
            f"the session may become {max_length} tokens long, and this verifier has KV for {kv_tokens}; ask for less, "
            "or another verifier.",
            reason=KV_TOO_SMALL,
        )


def _check_tokens(request: verifier_pb2.DecodeOpen, model: types_pb2.ModelInfo) -> None:
    prefix, prediction = request.prefix, request.prediction_token_ids
    if not 0 < prefix.prompt_length <= len(prefix.token_ids):
        raise InvalidArgument(
            "the prefix must hold the whole prompt, which has at least one token.", reason="EMPTY_PROMPT"
        )
    if not len(prefix.token_ids) < request.max_length <= model.max_length:
        raise InvalidArgument(
            f"max_length must exceed the prefix and be at most the model's {model.max_length}.",
            reason="PROMPT_TOO_LONG",
        )
    if len(prediction) > model.max_length:
        raise InvalidArgument(
            f"the prediction has more tokens than the model's {model.max_length}; shorten it.",
            reason="PREDICTION_TOO_LONG",
        )
    named = {
        "the prefix": max(prefix.token_ids),
        "the prediction": max(prediction, default=0),
        "reasoning_limit": max(request.reasoning_limit.begin_token_id, request.reasoning_limit.end_token_id),
        **proto_conversion.highest_tokens(request.sampling),
    }
    for where, highest in named.items():
        if highest >= model.vocabulary_size:
            raise InvalidArgument(
                f"{where} names a token outside the vocabulary of {model.vocabulary_size}.",
                reason="TOKEN_OUT_OF_RANGE",
            )


def check_rule(sampling: SamplingParams, *, lossy_rules: bool) -> None:
    """Raises InvalidArgument for a lossy rule where the executor runs exact ones alone."""
    if sampling.lossy and not lossy_rules:
        raise InvalidArgument(
            f"acceptance rule {sampling.acceptance!r} runs on the embedded engine alone; use the coupled rule here.",
            reason="RULE",
        )


def check_prompt_logprobs(request: verifier_pb2.DecodeOpen, *, scores_prompts: bool) -> None:
    """Raises InvalidArgument for more than a message holds, and where the executor scores no prompts."""
    if request.HasField("prompt_logprobs"):
        proto_conversion.check_prompt_logprobs(request.prompt_logprobs, request.prefix.prompt_length)
        if not scores_prompts:
            raise InvalidArgument(
                "log-probabilities of prompts are given by the embedded engine alone; leave them out here.",
                reason="PROMPT_LOGPROBS",
            )


def check_trust(sampling: SamplingParams, addresses: Sequence[verifier_pb2.DrafterAddress]) -> None:
    """Raises PermissionDenied for a ratio rule with several or untrusted drafters, because it must believe their q;
    InvalidArgument for a ratio rule with a shadow drafter, which could not be scored."""
    if not sampling.drawn:
        return
    if any(address.shadow for address in addresses):
        raise InvalidArgument(
            f"under acceptance rule {sampling.acceptance!r} nothing is known of candidates that were not verified; "
            "leave the shadow out, or use the coupled rule.",
            reason="SHADOW",
        )
    if len(addresses) > 1:
        raise PermissionDenied(
            f"acceptance rule {sampling.acceptance!r} needs to know what each token was drawn from, so its sessions "
            "have one drafter; name one, or use the coupled rule.",
            reason="SEVERAL_DRAFTERS",
        )
    if not all(address.trusted for address in addresses):
        raise PermissionDenied(
            f"acceptance rule {sampling.acceptance!r} must believe the drafter's q; use a trusted drafter or the "
            "coupled rule.",
            reason="UNTRUSTED_DRAFTER",
        )
