"""Checkpoints and their forward passes: the library's, the lean one, quantised weights."""
