"""Sessions: their runs, owners and output streams. Imports everything below it, neither `api` nor `telemetry`."""
