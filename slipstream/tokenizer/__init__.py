"""Vocabularies, byte decoding, grammars and structured output. Imports no torch and no other package."""
