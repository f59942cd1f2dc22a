"""vLLM's Model Runner V2 under our own scheduling: what the verifier's executor and the engine of draft models share,
and that engine. What imports vllm at once is imported on demand: `device_runner`, `chain_runner` and `chain_worker`."""
