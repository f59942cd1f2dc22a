"""The metrics of one role, read from the numbers that the role keeps.

Counters and gauges are plain numbers of the role's event loop and cost no more than other numbers; they are read when a
scrape comes. Histograms are prometheus_client's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from platform import python_version

from prometheus_client import CollectorRegistry, Histogram, Metric, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from slipstream.telemetry import metrics
from slipstream.telemetry.tracing import Tracing
from slipstream.version import running_version

disable_created_metrics()  # type: ignore[no-untyped-call]  # an unused series for each counter

Values = Mapping[tuple[str, ...], float]
"""Keyed by the values of the labels."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """A histogram that is scraped under another name as well: nothing more is observed for it."""

    histogram: Histogram
    labels: Callable[[Mapping[str, str]], tuple[str, ...]]
    """Converts the histogram's labels to values of the other name's; series that get equal ones are added up."""


Source = Callable[[], float | Values] | Histogram | Renamed
OTHER = "other"
"""The label of all values beyond the bound."""
MAX_LABEL_CHARACTERS = 64


def build_info(role: metrics.Role) -> Callable[[], Values]:
    """Source of BUILD."""
    return lambda: {(role, running_version(), python_version()): 1}


def forward_info(path: str, notice: str) -> Callable[[], Values]:
    """Source of FORWARD, from a model's `forward_path` and `forward_notice`."""
    return lambda: {(path, str(int(bool(notice)))): 1} if path else {}


def spans_of(tracing: Tracing | None) -> Source:
    """Source of SPANS; empty where nothing is traced."""
    return dict if tracing is None else tracing.counts


class MetricsCollector(Collector):
    """`read` copies the numbers, on the event loop; `collect` yields the copies, on any thread."""

    def __init__(self, role: metrics.Role, sources: Mapping[metrics.Metric, Source]) -> None:
        """Deprecated metrics have no sources: they repeat the present ones. Raises ValueError where another metric of
        the role has no source, or a source no metric of the role."""
        declared = {metric for metric in metrics.DECLARED if role in metric.roles}
        present = {metric.name: metric for metric in declared}
        self._deprecated = {old: present[old.same_as] for old in declared if old.name in metrics.DEPRECATED}
        declared -= self._deprecated.keys()
        if odd := declared ^ set(sources):
            raise ValueError(
                f"declared for the {role} or given a source, but not both: {sorted(each.name for each in odd)}"
            )
        self._sources = sources
        self._values: dict[metrics.Metric, Values] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def read(self) -> None:
        for metric, source in self._sources.items():
            if not isinstance(source, Histogram | Renamed):
                value = source()
                self._values[metric] = dict(value) if isinstance(value, Mapping) else {(): value}

    def collect(self) -> Iterator[Metric]:
        values = dict(self._values)
        for metric, source in self._sources.items():
            if isinstance(source, Histogram):
                yield from source.collect()
            elif isinstance(source, Renamed):
                yield _renamed(metric, source)
            else:
                yield _family(metric, values.get(metric, {}))
        for old, metric in self._deprecated.items():
            source = self._sources[metric]
            if isinstance(source, Histogram):
                yield _renamed(old, Renamed(source, partial(_values_of, old.labels)))
            else:
                yield _family(old, values.get(metric, {}))


def _values_of(names: tuple[str, ...], labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(labels[name] for name in names)


def _family(metric: metrics.Metric, values: Values) -> Metric:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _renamed(metric: metrics.Metric, source: Renamed) -> Metric:
    summed: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
    for family in source.histogram.collect():
        for sample in family.samples:
            series = summed.setdefault(source.labels(sample.labels), {})
            place = sample.name.removeprefix(family.name), sample.labels.get("le", "")
            series[place] = series.get(place, 0.0) + sample.value
    renamed = Metric(metric.name, metric.help, "histogram")
    for values, series in summed.items():
        labels = dict(zip(metric.labels, values, strict=True))
        for (ending, bound), value in series.items():
            renamed.add_sample(metric.name + ending, labels | ({"le": bound} if bound else {}), value)
    return renamed


class BoundedLabels:
    """Label values that clients or peers choose, bounded in number so that a scrape stays small.

    The first `most` distinct values keep their name and later ones become OTHER. With `known` values, only those keep
    theirs, so that a client cannot use up the bound.
    """

    def __init__(self, most: int, known: Iterable[str] = ()) -> None:
        self._known = {value: clean_label(value) for value in known}
        self._most = len(self._known) or most

    def __call__(self, value: str) -> str:
        name = self._known.get(value)
        if name is None:
            if len(self._known) >= self._most:
                return OTHER
            name = self._known[value] = clean_label(value)
        return name


def clean_label(value: str) -> str:
    """The value with unprintable characters replaced: some parsers of scrapes end at a NUL."""
    return "".join(each if each.isprintable() else "?" for each in value[:MAX_LABEL_CHARACTERS])
