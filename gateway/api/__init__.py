"""The gateway's public protocols: gRPC. Imports everything below it."""
