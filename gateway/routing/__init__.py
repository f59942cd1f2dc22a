"""Which verifier decides a session and which drafters propose for it: workers, health, circuit breakers."""
