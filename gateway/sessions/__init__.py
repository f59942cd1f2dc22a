"""Sessions: who runs them, their rounds, their owners, and the streams of those who follow them."""
