"""A target cut over several processes. Goes once vLLM runs the large targets."""
