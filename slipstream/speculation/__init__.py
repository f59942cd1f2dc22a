"""The candidate tree, its frames and selections, positional noise and sampling parameters. Imports no torch and
nothing else of Slipstream but its errors."""
