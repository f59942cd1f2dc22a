"""gRPC between the roles: multiplexed streams, channels, servers, TLS, and the conversion of messages. Imports
`speculation`, `tokenizer` and `telemetry`."""
