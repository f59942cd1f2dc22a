"""Metrics as Prometheus would get them: over HTTP, parsed."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as text_families
from prometheus_client.samples import Sample

OPEN = "application/openmetrics-text; version=1.0.0"


@dataclass(frozen=True)
class Page:
    text: str
    families: list[Metric]

    def samples(self, name: str, **labels: str) -> list[Sample]:
        every = (sample for family in self.families for sample in family.samples)
        return [each for each in every if each.name == name and labels.items() <= each.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        """Summed over all other labels."""
        return sum(sample.value for sample in self.samples(name, **labels))

    def by(self, name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in self.samples(name)}

    @property
    def names(self) -> dict[str, tuple[str, str]]:
        """Name as it was declared -> kind and help; without those of the process."""
        return {
            family.name + ("_total" if family.type == "counter" else ""): (family.type, family.documentation)
            for family in self.families
            if not family.name.startswith("process_")
        }


def fetch(address: str, accept: str = OPEN) -> str:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def parse(text: str) -> Page:
    families: Iterable[Metric] = open_families(text) if text.endswith("# EOF\n") else text_families(text)
    return Page(text, list(families))


async def scrape(address: str, accept: str = OPEN) -> Page:
    return parse(await asyncio.to_thread(fetch, address, accept))
