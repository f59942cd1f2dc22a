"""From a client's request to a ResolvedRequest: limits, defaults, rules. Imports `config` and what is below it."""
