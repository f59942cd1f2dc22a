"""What HTTP protocols share: server, entry (keys, limits), errors, answers, event streams. Imports no protocol."""
