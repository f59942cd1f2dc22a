"""Runs models: packed forward passes over paged KV. The only shared code that imports torch."""
