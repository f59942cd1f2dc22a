"""API keys, tenants and their limits."""
