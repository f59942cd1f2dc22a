"""What HTTP protocols share: server, entry (keys, limits), errors, answers, event streams. Imports no protocol.

To add a route: write `routes(parts: HttpDependencies) -> APIRouter` in a module of `gateway.api` and list it in
`gateway.api.http_front`. Its function returns an `Answer` (`reply`) of a coroutine function, which calls
`parts.sessions.generate` with `context_of(request.scope)` and writes each event to the `Reply`. Keys, body limits,
clients that leave and errors are done. `gateway/api/openai/call.py` is the fullest example, `tests/web.py` the client
of tests.
"""
