"""Paged KV: the block pool, its manager, prefixes found again, and the tensors behind them."""
