"""Clients of a gateway: completions that survive a lost gateway, API keys, the load generator. Imports `rpc`."""
