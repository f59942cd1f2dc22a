"""Durable session records: the store contract, its backends and the session log. Imports only `slipstream`."""
