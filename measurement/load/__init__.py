"""Load on a server: when requests are sent, what came of each, latencies, and comparisons of runs in pairs."""
