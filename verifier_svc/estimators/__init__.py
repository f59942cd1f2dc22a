"""Estimators from measurements: cost of a step, probability of acceptance."""
