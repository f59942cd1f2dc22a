"""`python -m slipstream.telemetry`: the tables of docs/metrics.md."""

from __future__ import annotations

from slipstream.telemetry.metrics import DECLARED, ROLES, Metric, Role

HEAD = "| metric | kind | labels | meaning |\n|---|---|---|---|"


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def table(roles: tuple[Role, ...]) -> str:
    """The metrics that exactly these roles have."""
    return "\n".join([HEAD, *(row(metric) for metric in DECLARED if metric.roles == roles)])


if __name__ == "__main__":
    for roles in (ROLES, *((role,) for role in ROLES)):
        print(f"{', '.join(roles)}\n\n{table(roles)}\n")
