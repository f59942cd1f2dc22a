"""What the services tell of themselves to those who run them: metrics, logs, traces."""
