"""Metrics, logs and traces of the services, for those who run them. Imports `config` and `errors`."""
