"""The gateway's public faces: gRPC. Imports `requests` and `sessions`."""
