"""Drives sessions: pairs them with workers, coordinates rounds and rollback, keeps their log. No model, no torch."""
