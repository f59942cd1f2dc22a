"""From a client's request to a ResolvedRequest: limits, defaults, rules. Imports `routing`, `auth`, `text`, `config`."""
