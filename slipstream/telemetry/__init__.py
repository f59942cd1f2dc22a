"""Metrics, logs and traces of the services, for their operators. Imports `config` and `errors`."""
