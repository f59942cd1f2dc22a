"""Capacity: how many drafters and verifiers a traffic needs, what it will notice of them, and what that costs."""
