"""A large request of gRPC, taken apart in a working process: what is left for the event loop is small.

A list of a million empty messages has 3 MB on the wire, and takes 70 ms and 100 MB to parse. A working process parses
the request, refuses lists that no request needs, and takes the conversation and lists of token ids out of it, which the
gateway gets as bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError, Message

from gateway.text.chat_messages import chat_goes_on, check_messages
from gateway.text.json_body import IDS
from gateway.work.frames import Buffer, JobFrame
from slipstream.errors import NOT_PROTOBUF, TOO_MANY_ITEMS, InvalidArgument
from slipstream.v1 import gateway_pb2

MOST_ITEMS = 4096
"""Most items of a list besides messages and token ids: four times what any may have."""
LeastTokens = Callable[[gateway_pb2.Chat], int]
"""Tokens that a conversation has at least."""


class LargeRequest(NamedTuple):
    """A GenerateRequest that was taken apart."""

    rest: gateway_pb2.GenerateRequest
    """Without what the other fields have."""
    counts: Mapping[str, int]
    """Token ids of the `prompt` and of the `prediction`, where the request has these as token ids."""
    prompt: array[int]
    """Empty where the request has none, or more than any model takes."""
    prediction: array[int]
    chat: bytes = b""
    """Serialised."""
    least: int = 1
    """Tokens that the conversation has at least."""
    goes_on: bool = False
    """Whether the answer goes on with the conversation's last message."""


def take_apart(body: Buffer, least_tokens: LeastTokens, most_ids: int) -> JobFrame:
    """`most_ids`: of a prompt or prediction that some model takes; of a longer one only the count is returned. Raises
    InvalidArgument for what is no GenerateRequest, and for too many items."""
    request = gateway_pb2.GenerateRequest()
    head: dict[str, Any] = {"counts": {}}
    try:
        request.ParseFromString(bytes(body))
    except DecodeError as error:
        raise InvalidArgument(
            "the request is no protobuf of this contract; regenerate the client.", reason=NOT_PROTOBUF
        ) from error
    parts = {"prompt": b"", "prediction": b"", "chat": b""}

    def take(name: str, ids: Sequence[int]) -> None:
        head["counts"][name] = len(ids)
        if len(ids) <= most_ids:
            parts[name] = array(IDS, ids).tobytes()

    if request.HasField("chat"):
        check_messages(request.chat)
        head |= {"least": least_tokens(request.chat), "goes_on": chat_goes_on(request.chat)}
        parts["chat"] = request.chat.SerializeToString()
        request.ClearField("chat")
    if request.HasField("prompt_token_ids"):
        take("prompt", request.prompt_token_ids.token_ids)
        request.ClearField("prompt_token_ids")
    if request.prediction.HasField("token_ids"):
        take("prediction", request.prediction.token_ids.token_ids)
        request.ClearField("prediction")
    _check_items(request, "")
    rest = request.SerializeToString()
    sizes = {name: len(part) for name, part in parts.items()}
    return JobFrame({"sizes": sizes, **head}, b"".join((*parts.values(), rest)))


def put_together(result: JobFrame) -> LargeRequest:
    sizes, begin, parts = result.head["sizes"], 0, dict[str, bytes]()
    for name, size in sizes.items():
        parts[name], begin = bytes(result.body[begin : begin + size]), begin + size
    prompt, prediction = (array(IDS, parts[name]) for name in ("prompt", "prediction"))
    rest = gateway_pb2.GenerateRequest.FromString(bytes(result.body[begin:]))
    head = {name: result.head[name] for name in ("least", "goes_on") if name in result.head}
    return LargeRequest(rest, result.head["counts"], prompt, prediction, parts["chat"], **head)


def _check_items(message: Message, within: str) -> None:
    for field, value in message.ListFields():
        name = f"{within}{field.name}"
        if field.is_repeated:
            if len(value) > MOST_ITEMS:
                raise InvalidArgument(
                    f"{name} holds {len(value)} items, and no request may have more than {MOST_ITEMS}; send fewer.",
                    reason=TOO_MANY_ITEMS,
                    field=name,
                    numbers={"items": len(value), "limit": MOST_ITEMS},
                )
        elif field.message_type is not None:
            _check_items(value, f"{name}.")
