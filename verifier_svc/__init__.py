"""The verifier: runs the target model and commits tokens; imports `slipstream` and no other service."""
