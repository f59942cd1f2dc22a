"""API keys, tenants and their limits. Imports `store` alone."""
