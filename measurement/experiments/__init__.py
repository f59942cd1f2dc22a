"""Statistics of A/B experiments: samples of several gateways merged, arms compared with confidence intervals."""
