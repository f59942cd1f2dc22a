"""A bigger model that computes the same function as a small one, to measure at the price of a big target."""
