"""`python -m capacity`."""

from __future__ import annotations

import typer

from capacity.command import plan

if __name__ == "__main__":
    typer.run(plan)
