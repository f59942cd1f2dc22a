"""Attention of a packed step over paged KV: the plan that layers share, and masks of candidate trees."""
