"""An engine without a model, for load, scale and chaos tests."""
