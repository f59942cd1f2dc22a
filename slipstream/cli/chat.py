"""`slipstream chat`: a conversation with a model, in its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from slipstream.cli.options import (
    Connection,
    Drafters,
    MaxTokens,
    Model,
    NoSpeculation,
    Seed,
    Temperature,
    TopP,
    explained,
)
from slipstream.client.completion import Completion
from slipstream.client.options import ChatOptions
from slipstream.client.sync_client import Client
from slipstream.errors import SlipstreamError

ABOUT = "/quit ends the conversation, /reset begins another one, Ctrl-C stops an answer."


def chat(
    connection: Connection,
    message: Annotated[
        list[str] | None, typer.Option(help="Send this message and end after the answer; repeat for more turns.")
    ] = None,
    system: Annotated[str, typer.Option(help="System message at the beginning.")] = "",
    model: Model = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    no_speculation: NoSpeculation = False,
    drafter: Drafters = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as one JSON object.")] = False,
) -> None:
    """Talk with a model, with the whole conversation so far in each request."""
    options = ChatOptions(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        speculation=not no_speculation,
        drafters=drafter,
    )
    if not message:
        typer.echo(ABOUT, err=True)
    with explained("chat"), connection.client() as client:
        Conversation(client, options, system, as_json).hold(message or _typed(), fail=bool(message))


def _typed() -> Iterator[str]:
    """Lines that the user writes, until the end of the input."""
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo("", err=True)
            return


class Conversation:
    """Messages of one conversation, and how they are sent and shown."""

    def __init__(self, client: Client, options: ChatOptions, system: str, as_json: bool) -> None:
        self._client = client
        self._options = options
        self._begin = [{"role": "system", "content": system}] if system else []
        self._as_json = as_json
        self.messages = list(self._begin)

    def hold(self, said: Iterable[str], fail: bool) -> None:
        """Answers each message. `fail`: raises the SlipstreamError of one that cannot be answered; otherwise it is
        shown, and the next message is said instead."""
        for text in said:
            command = text.strip()
            if command == "/quit":
                return
            if command == "/reset":
                self.messages = list(self._begin)
            elif command:
                try:
                    self._turn(text)
                except SlipstreamError as error:
                    if fail:
                        raise
                    typer.echo(f"{error.message} [{error.reason}]", err=True)

    def _turn(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = self._answer(asked)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]

    def _answer(self, messages: list[dict[str, str]]) -> Completion:
        """Shows an answer while it comes. Ctrl-C ends it; what was said stays part of the conversation."""
        with self._client.stream_chat(messages, **self._options) as stream:
            try:
                for piece in stream:
                    if not self._as_json:
                        typer.echo(piece.text, nl=False)
            except KeyboardInterrupt:
                if stream.completion.session_id:
                    self._client.cancel(stream.completion.session_id)
        typer.echo(json.dumps(stream.completion.report()) if self._as_json else "")
        return stream.completion
