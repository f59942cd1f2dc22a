"""What HTTP protocols share: server, entry (keys, limits), errors, answers, event streams. Imports no protocol.

To add a route, list a module's `routes` in `gateway.api.http_front._ROUTES`:

    def routes(parts: HttpDependencies) -> APIRouter:
        router = APIRouter()

        @router.post("/v1/lines")
        async def lines(asked: CompletionRequest, request: Request) -> Answer:
            async def work(reply: Reply) -> None:
                async def send(event: Event) -> None:
                    if isinstance(event, gateway_pb2.Delta):
                        await reply.send_event(json.dumps(event.text))

                generate = asked.to_generate(asked.prompts()[0], 0)
                await parts.sessions.generate(generate, context_of(request.scope), send)
                await reply.end_events()

            return Answer(work, parts.config.http_idle_s)

        return router

Keys, body limits, clients that leave and errors are done by then. `gateway/api/openai/call.py` is the fullest example,
`tests/web.py` the client of tests.
"""
