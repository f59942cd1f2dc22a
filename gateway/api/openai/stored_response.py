"""What a response leaves for requests that come later, in the annotation of its session: any gateway of the store reads
it, for the session's own tenant, until the record expires."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from gateway.text.tool_calls import new_reader
from slipstream.errors import InvalidArgument, NotFound

MOST_BYTES = 1 << 24
"""Most bytes of the JSON: annotations are read that clients of gRPC may have written."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    created_at: int
    """Unix seconds."""
    format: str
    """The format of tool calls in the output."""
    metadata: dict[str, str]
    messages: list[dict[str, Any]]
    """The conversation up to the output, as chat templates read it, without instructions."""
    previous_response_id: str | None = None

    def pack(self) -> bytes:
        """Compressed JSON. Raises InvalidArgument for a conversation above MOST_BYTES."""
        written = json.dumps(asdict(self), ensure_ascii=False).encode()
        if len(written) > MOST_BYTES:
            raise InvalidArgument(
                f"The conversation is above {MOST_BYTES} bytes; begin another one, or send store: false.",
                reason="CONVERSATION_TOO_LONG",
            )
        return zlib.compress(written)


_READER = TypeAdapter(StoredResponse)


def unpack(annotation: bytes) -> StoredResponse:
    """Raises NotFound for the annotation of a session that is no response."""
    try:
        stored = _READER.validate_json(zlib.decompressobj().decompress(annotation, MOST_BYTES))
        new_reader(stored.format)
    except (zlib.error, ValueError, KeyError):  # without what was read, which may be anybody's text
        raise NotFound("There is no such response.", reason="NO_RESPONSE") from None
    return stored
