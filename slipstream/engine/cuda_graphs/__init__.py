"""Padded steps in captured CUDA graphs. Never run on a GPU; goes once vLLM runs the large targets."""
