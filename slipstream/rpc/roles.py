"""Names of the roles, as certificates and logs have them."""

DRAFTER, VERIFIER, GATEWAY = "drafter", "verifier", "gateway"
