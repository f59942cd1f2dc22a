"""Beside the product: load on a server, whether a pair is worth serving, and the arms of an experiment."""
