"""Parts that HTTP protocols share: server, entry (keys, limits), errors, answers, event streams. Imports no protocol.

To add a route, write a new module, here or beside the protocol that it belongs to, and list its `routes` in
`gateway.api.http_front._ROUTES`. This one is `gateway/api/lines.py` (its test is the example for yours:
tests/integration/test_http_added_route.py):

    import json

    from fastapi import APIRouter, Request

    from gateway.api.http.body import BodyRoute
    from gateway.api.http.dependencies import HttpDependencies
    from gateway.api.http.entry import context_of
    from gateway.api.http.reply import Answer, Reply
    from gateway.api.openai.fields import SamplingFields, log_unknown
    from gateway.sessions.output_stream import Event
    from slipstream.v1 import gateway_pb2

    class LinesRequest(SamplingFields):  # OpenAI's fields; other values than the types allow are refused
        prompt: str

    def routes(parts: HttpDependencies) -> APIRouter:
        router = APIRouter(tags=["Slipstream"], route_class=BodyRoute)  # the body is forgotten once it is parsed

        @router.post("/v1/lines", description="Streams the continuation of a prompt.")
        async def lines(asked: LinesRequest, request: Request) -> Answer:
            log_unknown(asked)
            generate, context = asked.to_generate(asked.prompt, 0), context_of(request.scope)

            async def work(reply: Reply) -> None:
                async def send(event: Event) -> None:
                    if isinstance(event, gateway_pb2.Delta) and event.text:
                        await reply.send_event(json.dumps(event.text))  # one line

                await parts.sessions.generate(generate, context, send)
                await reply.send_event("[DONE]")
                await reply.end_events()

            return Answer(work, parts.config.http_idle_s)

        return router

The rest is done for it. `Entry` checks key (which counts the request against its tenant's rate) and body size before
the body is read; `sessions.generate` checks the request, reserves the tenant's tokens and session, and makes the trace.
`Answer` sends an error as the answer's status, or behind the first event as the last one, in OpenAI's shape (with the
tag "Anthropic" in theirs). It cancels `work` when the client leaves, and closes the connection of one that does not
read; the session can be resumed. This route serves one text, whatever `n` says: `gateway/api/openai/completions.py`
serves several prompts and choices, `answer_of_events` in `reply` streams of named events.

The route also gets a test (`tests/support/http_client.py` is the client), a row in `GENERATING` of
test_http_hostile.py (limits: copy the numbers of a row there), in `WHOLE` of test_http_schema.py (mutated requests)
and in tests/isolation/table.py (what it could strain), a row in `docs/http.md`, and a line in CHANGELOG.md. The tests
that read the OpenAPI document find the route there: they attack it, and call it without a key.
"""
