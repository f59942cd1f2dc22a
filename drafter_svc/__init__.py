"""The drafter: guesses. A plain server; nothing it sends can change a session's text."""
