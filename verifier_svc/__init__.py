"""The verifier: decides. The only place where a token becomes real."""
