"""Kernels of our own in C, where torch's take more than 1.15 times as long as reading the weights. Imports nothing of
the engine; without a compiled file torch's kernels are used."""
