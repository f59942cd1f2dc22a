"""The command line: `commands` puts it together, each other file has one command or a few."""
