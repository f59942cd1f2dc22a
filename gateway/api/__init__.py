"""The gateway's public protocols: gRPC, and HTTP for clients of OpenAI and Anthropic. Imports everything below it.

`gateway.api.http` says how to add an HTTP route, for which all this is done. To add a protocol, do this for each call:

1. Build a RequestContext from the call's headers and peer.
2. Call `ApiKeys.authenticate` with it, before the request is parsed, and put the tenant that it returns into it.
   The object is the one that `gateway.gateway.running` makes; all protocols share it. It is None without keys.
3. Call `SessionRegistry.generate` or `resume` with the request, the context and a coroutine function `send`. The first
   event means that the request was admitted: an error before it can still be the answer's status. The next event comes
   once `send` has returned, which is the flow control.
4. When the client leaves, cancel the call of 3: the last client of a session stops it, which frees its KV before the
   verifier's next step. It stays resumable; `SessionRegistry.cancel` ends it for good.
5. For an exception, send `typed_error` of it (`slipstream.errors`): it has a gRPC code and an HTTP status;
   `message_to_send` and `retry_delay_s` are its sentence and its Retry-After. Send the context's trailers too.

A gateway that ends waits for the protocol's clients (`gateway.gateway.drain`); the protocol stops taking new ones.
tests/integration/test_gateway_without_grpc.py is an example.
"""
