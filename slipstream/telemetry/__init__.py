"""What the services tell of themselves: traces, metrics, logs."""
