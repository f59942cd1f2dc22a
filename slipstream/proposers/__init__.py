"""Drafting methods behind one protocol and one registry; imports the engine, tokenizers, speculation, no service."""
