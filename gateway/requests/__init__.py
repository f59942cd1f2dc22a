"""From a request to what it will do: limits, defaults and rules."""
