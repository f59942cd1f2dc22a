"""Processes that `slipstream serve` runs on one machine: roles, which of them there are, and where each computes."""
