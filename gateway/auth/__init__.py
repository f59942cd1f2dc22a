"""API keys, tenants and their limits. Imports only `request_context`."""
