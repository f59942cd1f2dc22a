"""Paged KV: the block pool, sequences, prefixes found again, and the tensors behind them."""
