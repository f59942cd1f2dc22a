"""Benchmarks: commands that print what they measured. None of them is a test."""
