"""Rounds as they ended: their results, details for clients, and who observes them."""
