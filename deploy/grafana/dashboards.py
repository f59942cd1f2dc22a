"""All dashboards. `python -m deploy.grafana` writes them after a change."""

from __future__ import annotations

from deploy.grafana.acceptance import ACCEPTANCE
from deploy.grafana.fleet import FLEET
from deploy.grafana.latency import LATENCY
from deploy.grafana.overview import OVERVIEW

DASHBOARDS = (OVERVIEW, ACCEPTANCE, LATENCY, FLEET)
