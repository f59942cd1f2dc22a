"""`python -m deploy.grafana`: writes the dashboards beside this file."""

from __future__ import annotations

from pathlib import Path

from deploy.grafana.acceptance import ACCEPTANCE
from deploy.grafana.fleet import FLEET
from deploy.grafana.latency import LATENCY
from deploy.grafana.overview import OVERVIEW

DASHBOARDS = (OVERVIEW, ACCEPTANCE, LATENCY, FLEET)


if __name__ == "__main__":
    for dashboard in DASHBOARDS:
        (Path(__file__).parent / f"{dashboard.name}.json").write_text(dashboard.text(), "utf-8")
