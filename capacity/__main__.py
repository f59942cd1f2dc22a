"""`python -m capacity`."""

from __future__ import annotations

import typer

from capacity.command import plan

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(plan)
    app(prog_name="slipstream plan")
