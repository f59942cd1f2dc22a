"""`python -m slipstream`: the command line without the installed script."""

from slipstream.cli.commands import app

app()
