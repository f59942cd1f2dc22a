"""Options of a client's request, by keyword, and the message that is made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from slipstream.errors import InvalidArgument
from slipstream.rpc import proto_conversion
from slipstream.tokenizer.structured_output import FORMATS, StructuredOutput
from slipstream.v1 import gateway_pb2, types_pb2

REQUEST_FIELDS = (
    *("model", "max_tokens", "stop_token_ids", "bad_words", "ignore_eos", "workload", "cache_salt", "priority"),
    *("mixed_arithmetic", "include_stop", "show_special_tokens", "stream_interval"),
)
"""Options with the name and type of a field of the request; so are the next of a part of it, and those of
`SamplingOptions`."""
SPECULATION_FIELDS = ("max_draft_tokens", "drafters")


class GenerateOptions(TypedDict, total=False):
    """Options of a completion. The server has a default for each that is left out or None."""

    model: str
    max_tokens: int | None
    temperature: float | None
    """0 is greedy decoding."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    """Added to the logits of tokens, by token id."""
    allowed_token_ids: Sequence[int] | None
    """The output has these tokens alone; without an end-of-text token among them it ends by its length or a stop
    string."""
    bad_words: Sequence[str] | None
    """Words that the output does not have, at its beginning and behind a space."""
    seed: int | None
    """Requests of one seed get one text; without one the server draws it."""
    acceptance: str
    """`coupled` or `rejection`."""
    stop: str | Sequence[str] | None
    """The text ends before the first of these strings."""
    stop_token_ids: Sequence[int] | None
    include_stop: bool
    """The text ends behind the stop string that ended it, not before."""
    show_special_tokens: bool
    """Special tokens stand in the text as they are written."""
    stream_interval: int
    """Least tokens of a message, but for the first and the last one, and for what there is after 5 seconds."""
    ignore_eos: bool
    """Continue after the model's end-of-text token."""
    speculation: bool
    """False is plain decoding."""
    max_draft_tokens: int | None
    """Most candidates verified in one round."""
    drafters: Sequence[str] | None
    """Names of drafters to use."""
    prediction: str | Sequence[int] | None
    """Expected output, to draft from."""
    json_schema: str | Mapping[str, Any] | None
    """JSON schema that the output must match; at most one of this and the next three."""
    regex: str | None
    grammar: str | None
    json_object: bool
    logprobs: int | None
    """Ask for the log-probability of each token and of this many alternatives."""
    workload: str
    """Kind of request, such as "code"."""
    cache_salt: str
    """KV caches are shared only with requests of the same salt."""
    priority: int
    """Lower values are served first."""
    mixed_arithmetic: bool | None
    """Where no verifier is left that computes as the one that began the text: True goes on with another, marked in
    `Statistics.arithmetics`; False ends with Unavailable (ARITHMETIC_GONE). None: as the operator chose."""


class ChatOptions(GenerateOptions, total=False):
    """Options of the answer to a conversation."""

    tools: Sequence[Mapping[str, Any]]
    """Functions that the model may call, as OpenAI's API describes them."""
    template_variables: Mapping[str, Any]
    """More variables that the chat template reads, such as `enable_thinking`."""


class RollbackOptions(TypedDict, total=False):
    """Options of a rolled-back session's new output."""

    edit: str | Sequence[int]
    """Text or tokens behind the tokens that stay."""
    seed: int | None
    """With the session's own seed, which is the default, the text repeats."""
    max_tokens: int | None
    """Most output tokens in all."""


Prompt = str | Sequence[int]
"""A text, or token ids."""
Message = Mapping[str, Any]
"""One message of a conversation: `role`, `content`, and what else the model's chat template reads."""


def build_request(prompt: Prompt, **options: Unpack[GenerateOptions]) -> gateway_pb2.GenerateRequest:
    """A request to continue a text. Raises InvalidArgument for an option that does not exist or does not fit."""
    request = _request(options)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.prompt_token_ids.CopyFrom(_token_ids(prompt))
    return request


def build_chat(messages: Sequence[Message], **options: Unpack[ChatOptions]) -> gateway_pb2.GenerateRequest:
    """A request for the next message of a conversation. Raises what `build_request` raises."""
    tools, variables = options.pop("tools", ()), options.pop("template_variables", {})
    request = _request(options)
    request.chat.SetInParent()
    for message in messages:
        others = {name: value for name, value in message.items() if name != "role" and value is not None}
        content = others.pop("content") if isinstance(others.get("content"), str) else ""
        fields = _json(others) if others else ""
        request.chat.messages.add(role=str(message.get("role", "")), content=content, fields_json=fields)
    request.chat.tools_json = _json(list(tools)) if tools else ""
    request.chat.template_variables_json = _json(dict(variables)) if variables else ""
    return request


def build_rollback(
    session_id: str, keep: int, branch: bool, **options: Unpack[RollbackOptions]
) -> gateway_pb2.RollbackRequest:
    """A request to roll a session back to `keep` output tokens. Raises what `build_request` raises."""
    check_names(options, RollbackOptions)
    edit = options.get("edit")
    try:
        return gateway_pb2.RollbackRequest(
            session_id=session_id,
            output_tokens=keep,
            seed=options.get("seed"),
            max_tokens=options.get("max_tokens"),
            text=edit if isinstance(edit, str) else None,
            token_ids=None if edit is None or isinstance(edit, str) else _token_ids(edit),
            branch=branch,
        )
    except (TypeError, ValueError) as error:
        raise _unfit(error) from error


def check_names(options: Mapping[str, Any], known: type) -> None:
    """Raises InvalidArgument for an option that does not exist."""
    if unknown := sorted(options.keys() - known.__annotations__.keys()):
        raise InvalidArgument(f"{', '.join(unknown)}: no such option; see {known.__name__}.", reason="BAD_OPTION")


def _request(options: GenerateOptions) -> gateway_pb2.GenerateRequest:
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    check_names(given, GenerateOptions)
    stop = given.get("stop", ())
    prediction = given.get("prediction")
    try:
        return gateway_pb2.GenerateRequest(
            **_chosen(given, REQUEST_FIELDS),
            stop=[stop] if isinstance(stop, str) else stop,
            sampling=gateway_pb2.SamplingOptions(
                **_chosen(given, proto_conversion.SAMPLING_FIELDS)
                | {"acceptance": proto_conversion.rule_number(given.get("acceptance", "coupled"))}
            ),
            speculation=gateway_pb2.SpeculationOptions(
                **_chosen(given, SPECULATION_FIELDS), disabled=not given.get("speculation", True)
            ),
            prediction=None if prediction is None else _prediction(prediction),
            structured_output=_structure(given),
            logprobs="logprobs" in given,
            top_logprobs=given.get("logprobs", 0),
        )
    except (TypeError, ValueError) as error:  # protobuf's own checks of types and ranges
        raise _unfit(error) from error


def _chosen(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _prediction(prediction: Prompt) -> gateway_pb2.Prediction:
    if isinstance(prediction, str):
        return gateway_pb2.Prediction(text=prediction)
    return gateway_pb2.Prediction(token_ids=_token_ids(prediction))


def _token_ids(tokens: Sequence[int]) -> gateway_pb2.TokenIds:
    try:
        return gateway_pb2.TokenIds(token_ids=tokens)
    except (TypeError, ValueError) as error:
        raise _unfit(error) from error


def _structure(given: Mapping[str, Any]) -> types_pb2.StructuredOutput | None:
    chosen = [(name, given[name]) for name in FORMATS if given.get(name) not in (None, False)]
    if len(chosen) > 1:
        raise InvalidArgument("give one of json_schema, regex, grammar and json_object.", reason="BAD_OPTION")
    for name, value in chosen:
        text = "" if name == "json_object" else value if isinstance(value, str) else _json(value)
        return proto_conversion.structure_to_proto(StructuredOutput(name, text))
    return None


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise _unfit(error) from error


def _unfit(error: Exception) -> InvalidArgument:
    return InvalidArgument(f"a value cannot be sent: {error}; see GenerateOptions.", reason="BAD_OPTION")
