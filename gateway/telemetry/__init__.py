"""Metrics, traces and experiment samples of a gateway's requests. Observes sessions; only the process
and `api` import it."""
