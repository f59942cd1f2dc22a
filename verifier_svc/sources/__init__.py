"""Where candidates come from: remote drafters, their links and their limits, and shadows."""
