"""The drafter service: proposes candidates over gRPC; imports the shared library and no other service."""
