"""Grammars of structured output, compiled and followed by each session, and the tokens that rules forbid."""
