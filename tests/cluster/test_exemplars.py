"""Prometheus keeps the traces that histograms name: with the features that compose.yaml starts it with."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from gateway.telemetry.request_metrics import observe
from slipstream.telemetry import metrics
from slipstream.telemetry.metrics_collector import MetricsCollector, Source
from slipstream.telemetry.metrics_server import exposing
from tests.cluster.images import ROOT
from tests.cluster.programs import program
from tests.support.loopback_addresses import HOST, free_port

TRACE = f"{0xABCDEF:032x}"
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: gateway, static_configs: [{{targets: ["{target}"]}}]}}]
"""
PATIENCE_S = 120


def exemplars(port: int) -> Any:
    """Exemplars of the time to the first token; none while no page can be had."""
    name = f"{metrics.TTFT.name}_bucket"
    url = f"http://{HOST}:{port}/api/v1/query_exemplars?query={name}&start=0&end=9999999999"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as page:
            return json.load(page)["data"]
    except OSError:
        return []


async def test_a_trace_that_a_histogram_names_is_found_in_prometheus(tmp_path: Path) -> None:
    features = [
        word
        for word in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["prometheus"]["command"]
        if word.startswith("--enable-feature")
    ]
    ttft = metrics.TTFT.histogram()
    observe((ttft.labels("m", ""),), 2.5, {"trace_id": TRACE})
    declared = [each for each in metrics.DECLARED if "gateway" in each.roles and each.name not in metrics.DEPRECATED]
    sources: dict[metrics.Metric, Source] = {
        each: each.histogram() if each.kind == "histogram" else (dict if each.labels else float) for each in declared
    }
    port = free_port()
    async with exposing(MetricsCollector("gateway", sources | {metrics.TTFT: ttft}), f"{HOST}:0") as address:
        (tmp_path / "prometheus.yaml").write_text(CONFIG.format(target=address))
        words = [f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                program("prometheus"), *words, *features, f"--web.listen-address={HOST}:{port}", stderr=log
            )
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (found := await asyncio.to_thread(exemplars, port)):
                    await asyncio.sleep(0.2)
        finally:
            process.kill()
            await process.wait()
    [[exemplar]] = [each["exemplars"] for each in found]
    assert exemplar["labels"] == {"trace_id": TRACE} and float(exemplar["value"]) == 2.5
