"""gRPC between the roles: multiplexed streams, channels, servers, TLS, and the conversion of messages. Imports
`speculation`, `tokenizer` and `telemetry`."""

DRAFTER, VERIFIER, GATEWAY = "drafter", "verifier", "gateway"
"""Names of the roles, as certificates and logs have them."""
