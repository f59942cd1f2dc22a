"""Chooses workers for sessions and keeps their connections: health, circuit breakers, rules. Imports `store` only."""
