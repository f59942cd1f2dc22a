"""Traffic that is split between drafters, and what each arm showed."""
