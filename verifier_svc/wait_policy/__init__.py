"""The rules by which a step waits for candidates and drafters send them; imports nothing else of the verifier."""
