"""Turns a snapshot into the families of a page: devices, pods, ledger, the drop-in family, the exporter itself."""

import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import exporter
from exporter.exposition import (
    catalog,
    collectors_file,
    dcgm_collector,
    dcgm_labels,
    device_collector,
    ledger_collector,
    owner_collector,
    tenants,
)
from exporter.exposition.builder import Dropped, PageBuilder
from exporter.exposition.collectors_file import Collectors, Row
from exporter.exposition.dcgm_fields import Era
from exporter.exposition.dcgm_labels import LabelStyle
from exporter.exposition.family import NO_LABELS, Family, labels
from exporter.model import Snapshot, SourceState

_PART = "exposition"
_NEW_DEFAULT = collectors_file.default(Era.NEW)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpositionOptions:
    """How a snapshot is shown."""

    collectors: Collectors = collectors_file.DEFAULT
    names: Literal["legacy", "4.9"] = "legacy"
    """Names and units of the built-in default set; a collectors file prints what it says."""
    dcgm_labels: LabelStyle = dcgm_labels.DEFAULT
    series_limit: int = 20_000
    """Most series of the pod level; a holder that does not fit whole is left out and counted."""


def families(snapshot: Snapshot, options: ExpositionOptions) -> list[Family]:
    """Everything that the snapshot has to say, in a stable order; a pure function."""
    return build(snapshot, options, Dropped())[0]


def build(snapshot: Snapshot, options: ExpositionOptions, earlier: Dropped) -> tuple[list[Family], Dropped]:
    """The families of a page, and what was left out of this page and of all ``earlier`` ones."""
    page = PageBuilder()
    page.declare_all(catalog.ALL)
    room = device_collector.collect(page, snapshot, series_limit=options.series_limit)
    ledger_collector.collect(page, snapshot, series_limit=room)
    owner_collector.collect(page, snapshot)
    dcgm_collector.collect(page, snapshot, _rows(options), options.collectors.events, style=options.dcgm_labels)
    dropped = Dropped(series=earlier.series + page.dropped_series, reasons=earlier.reasons + page.reasons)
    _itself(page, snapshot, dropped)
    return page.families(), dropped


def _rows(options: ExpositionOptions) -> tuple[Row, ...]:
    if Era(options.names) is Era.NEW and not options.collectors.from_file:
        return _NEW_DEFAULT.rows
    return options.collectors.rows


def _itself(page: PageBuilder, snapshot: Snapshot, dropped: Dropped) -> None:
    version = labels(("version", exporter.__version__), ("python", platform.python_version()))
    page.metric(catalog.BUILD_INFO, version, 1)
    page.metric(catalog.SIMULATED, NO_LABELS, int(snapshot.simulated))
    for source in snapshot.sources:
        label = labels(("source", source.name))
        page.metric(catalog.SOURCE_UP, label, int(source.state is SourceState.UP))
        page.metric(catalog.WORKER_RESTARTS_TOTAL, label, source.restarts)
    if snapshot.attribution_enabled:
        well = snapshot.attribution_known and not snapshot.attribution_problem
        page.metric(catalog.SOURCE_UP, labels(("source", snapshot.attribution_source)), int(well))
    if snapshot.metadata_enabled:
        well = snapshot.metadata_known and not snapshot.metadata_problem
        page.metric(catalog.SOURCE_UP, labels(("source", "kubernetes-api")), int(well))
    if snapshot.dcgm_version:
        page.metric(catalog.DCGM_INFO, labels(("version", snapshot.dcgm_version)), 1)
    for (part, reason), count in sorted(_errors(snapshot.errors, dropped.reasons).items()):
        page.metric(catalog.ERRORS_TOTAL, labels(("part", part), ("reason", reason)), count)
    page.metric(catalog.SAMPLE_DURATION_SECONDS, NO_LABELS, snapshot.sample_duration_seconds)
    page.metric(catalog.TICK_DURATION_SECONDS, NO_LABELS, snapshot.tick_duration_seconds)
    page.metric(catalog.SNAPSHOT_TIMESTAMP_SECONDS, NO_LABELS, snapshot.taken_at_seconds)
    page.metric(catalog.SAMPLE_TIMESTAMP_SECONDS, NO_LABELS, snapshot.sample_at_seconds)
    page.metric(catalog.ATTRIBUTION_TIMESTAMP_SECONDS, NO_LABELS, snapshot.attribution_at_seconds)
    page.metric(catalog.METADATA_TIMESTAMP_SECONDS, NO_LABELS, snapshot.metadata_at_seconds)
    for reason, count in tenants.problems(snapshot).items():
        page.metric(catalog.POD_METADATA_PROBLEMS, labels(("reason", reason)), count)
    if snapshot.ledger_writer is not None:
        page.metric(catalog.LEDGER_WRITER, NO_LABELS, int(snapshot.ledger_writer))
    page.metric(catalog.DROPPED_SERIES_TOTAL, NO_LABELS, dropped.series)


def _errors(counted: Mapping[tuple[str, str], int], reasons: Counter[str]) -> Mapping[tuple[str, str], int]:
    errors = Counter(counted)
    for reason, count in reasons.items():
        errors[_PART, reason] += count
    return errors
