"""`python -m slipstream.telemetry`: the lists of docs/metrics.md."""

from __future__ import annotations

from slipstream.telemetry.metrics import DECLARED, DEPRECATED, MODEL_ROLES, ROLES, Metric, Role


def listed(roles: tuple[Role, ...]) -> str:
    """The metrics that exactly these roles have, without those that repeat another one's numbers."""
    return "\n".join(_line(metric) for metric in DECLARED if metric.roles == roles and not metric.same_as)


def same_numbers() -> str:
    """The names under which numbers are scraped a second and a third time."""
    others: dict[str, list[str]] = {}
    for metric in DECLARED:
        if metric.same_as and metric.name not in DEPRECATED:
            others.setdefault(metric.same_as, []).append(f"`{metric.name}`")
    return "\n".join(f"- `{name}`: {', '.join(names)}" for name, names in others.items())


def deprecated() -> str:
    """Old names of metrics, which the next release drops."""
    rows = [f"| `{old}` | `{new}` |" for old, new in DEPRECATED.items()]
    return "\n".join(["| deprecated | use |\n|---|---|", *rows])


def _line(metric: Metric) -> str:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    histogram = " Histogram." if metric.kind == "histogram" else ""
    return f"- `{metric.name}{labels}`: {metric.help}{histogram}"


if __name__ == "__main__":
    for roles in (ROLES, MODEL_ROLES, *((role,) for role in ROLES)):
        print(f"{', '.join(roles)}\n\n{listed(roles)}\n")
    print(f"{same_numbers()}\n\n{deprecated()}")
