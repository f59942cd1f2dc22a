"""A draft model that guesses for a target with another tokenizer; imports the engine and its sibling draft model."""
