"""`python -m gateway.text.worker`: the processes that read long texts and large bodies for a gateway."""

from __future__ import annotations

import json
import zlib
from array import array
from dataclasses import asdict
from typing import Any

from tokenizers import Tokenizer as Encoder

from gateway.text import large_message
from gateway.text.chat_messages import read_chat
from gateway.text.chat_size import ChatSize, least_tokens
from gateway.text.encoding import TextEncoding
from gateway.text.json_body import IDS, take_apart
from gateway.work.frames import Buffer, JobFrame
from gateway.work.server import Handlers, serve
from slipstream.tokenizer.chat_template_source import ChatTemplateSource
from slipstream.v1 import gateway_pb2


def setup_of(encoding: TextEncoding) -> JobFrame:
    """Set-up of the processes: the tokenizer as it is loaded here, whatever became of its files, and the template."""
    source = encoding.chat_template.given
    head = {"template": None if source is None else asdict(source), "most_bytes": encoding.chat_template.max_bytes}
    return JobFrame(head, encoding.encoder.to_str().encode())


def load(setup: JobFrame) -> Handlers:
    template = setup.head["template"]
    source = None if template is None else ChatTemplateSource(**template)
    encoding = TextEncoding(Encoder.from_str(bytes(setup.body).decode()), setup.head["most_bytes"], source)
    texts = _Texts(encoding)
    return {
        "encode": texts.encode,
        "chat": texts.chat,
        "decode": texts.decode,
        "message": lambda job: large_message.take_apart(job.body, texts.least_tokens, job.head["most_ids"]),
        "tokenize": texts.tokenize,
        "body": lambda job: take_apart(job.body, job.head["most_values"]),
        "deflate": lambda job: JobFrame({}, zlib.compress(job.body)),
        "inflate": lambda job: take_apart(
            inflated(job.body, job.head["most"]), job.head["most_values"], job.head["most_values"]
        ),
    }


class _Texts:
    def __init__(self, encoding: TextEncoding) -> None:
        self._encoding = encoding
        self._chat_size = ChatSize(encoding.chat_template)

    def least_tokens(self, chat: gateway_pb2.Chat) -> int:
        known = self._encoding.token_bytes
        return least_tokens(map(known.size, self._chat_size.texts_of_message(chat)), known.longest)

    def tokenize(self, job: JobFrame) -> JobFrame:
        """The answer of the RPC Tokenize, serialised."""
        tokens = self._encoding.encode(bytes(job.body).decode())
        return JobFrame({}, gateway_pb2.TokenizeResponse(token_ids=tokens).SerializeToString())

    def encode(self, job: JobFrame) -> JobFrame:
        return self._tokens(job.head, self._encoding.encode(bytes(job.body).decode(), job.head["text"]))

    def chat(self, job: JobFrame) -> JobFrame:
        if job.head["proto"]:
            messages, tools, variables = read_chat(gateway_pb2.Chat.FromString(bytes(job.body)))
        else:
            messages, tools, variables = json.loads(bytes(job.body))
        return self._tokens(job.head, self._encoding.encode_chat(messages, tools, variables, job.head["most_bytes"]))

    def decode(self, job: JobFrame) -> JobFrame:
        return JobFrame({}, self._encoding.decode(array(IDS, bytes(job.body)).tolist(), job.head["below"]).encode())

    def _tokens(self, head: dict[str, Any], tokens: list[int]) -> JobFrame:
        """The tokens, or what `/tokenize` answers of them."""
        asked = head["answer"]
        if asked is None:
            return JobFrame({}, array(IDS, tokens).tobytes())
        return JobFrame({}, self._encoding.tokenized(tokens, **asked))


def inflated(deflated: Buffer, most: int) -> bytes:
    """One byte more than `most` of what has more, and nothing of what was never deflated."""
    try:
        return zlib.decompressobj().decompress(deflated, most + 1)
    except zlib.error:
        return b""


if __name__ == "__main__":
    serve(load)
