"""Log-probabilities of a response that is read again. The session's record keeps none: they are computed again from its
tokens, as those of a prompt are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.api.http.dependencies import HttpDependencies
from gateway.request_context import RequestContext
from gateway.sessions.output_stream import Event
from slipstream.v1 import gateway_pb2


async def with_logprobs(
    parts: HttpDependencies, context: RequestContext, events: Sequence[Event], top: int
) -> Sequence[Event]:
    """The events of a response, whose Deltas get the log-probabilities of their tokens and of `top` likeliest ones.
    Raises what `SessionRegistry.generate` raises: for more of them than a request may have, a text that fills the
    model's whole length, and on an engine that scores no prompts."""
    started, *deltas = events
    assert isinstance(started, gateway_pb2.Started)
    output = [token for each in deltas if isinstance(each, gateway_pb2.Delta) for token in each.token_ids]
    if not output:
        return events
    tokens = [*started.prompt_token_ids, *output]
    found = iter((await _scored(parts, context, started.model, tokens, top))[-len(output) :])
    return [started, *(_filled(each, found) for each in deltas)]


def _filled(event: Event, found: Iterator[gateway_pb2.Logprob]) -> Event:
    if not isinstance(event, gateway_pb2.Delta):
        return event
    filled = gateway_pb2.Delta()
    filled.CopyFrom(event)
    filled.logprobs.extend(next(found) for _ in event.token_ids)
    return filled


async def _scored(
    parts: HttpDependencies, context: RequestContext, model: str, tokens: Sequence[int], top: int
) -> list[gateway_pb2.Logprob]:
    """Log-probabilities of all tokens but the first. The session that computes them leaves no record."""
    request = gateway_pb2.GenerateRequest(
        model=model,
        prompt_token_ids=gateway_pb2.TokenIds(token_ids=tokens),
        sampling=gateway_pb2.SamplingOptions(temperature=0.0),
        speculation=gateway_pb2.SpeculationOptions(disabled=True),
        max_tokens=1,
        prompt_logprobs=top,
    )
    found, session = list[gateway_pb2.Logprob](), ""

    async def send(event: Event) -> None:
        nonlocal session
        if isinstance(event, gateway_pb2.Started):
            session = event.session_id
        elif isinstance(event, gateway_pb2.Delta):
            found.extend(event.prompt_logprobs)

    await parts.sessions.generate(request, context, send)
    await parts.sessions.delete(session, context.tenant)
    return found
