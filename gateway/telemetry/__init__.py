"""Metrics, traces and experiment samples of a gateway's requests. Observes sessions; nothing else imports it but the process
itself."""
