"""A draft model that proposes for a target with another tokenizer; imports the engine and its siblings above."""
