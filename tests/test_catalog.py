import dataclasses
import re

from exposition_support import TRAINING, exclusive, lost, one_ledger, partitioned, shared, snapshot
from page_support import changed, samples_of

from exporter.metrics import catalog
from exporter.metrics.catalog import EXPORTED_PREFIXES
from exporter.metrics.collector import ExpositionOptions, ProcessMetrics, families
from exporter.metrics.text_format import Kind
from exporter.model.attribution import AllocationState
from exporter.model.fields import Field
from exporter.model.ledger import ByState, Totals
from exporter.model.snapshot import DeviceView, Snapshot


def everything() -> Snapshot:
    """Return a node with a value for every metric."""
    first = exclusive()
    values = {**dict.fromkeys(catalog.HEALTH_FIELDS, 1), **first.values, Field.NVLINK_TX_BYTES_TOTAL: 1}
    shown = snapshot(dataclasses.replace(first, values=values), shared(), *partitioned(), lost())
    unpriced = one_ledger({TRAINING: Totals(seconds=ByState(unknown=5.0), unpriced_seconds=5.0)}, identity="b" * 12)
    assert shown.metering.ledger is not None
    ledger = dataclasses.replace(shown.metering.ledger, ledgers=(*shown.metering.ledger.ledgers, *unpriced))
    return changed(shown, metering={"ledger": ledger})


def test_every_metric_has_a_unique_name_help_and_a_type_matching_its_name() -> None:
    names = [metric.name for metric in catalog.ALL]
    assert len(set(names)) == len(names)
    for metric in catalog.ALL:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name


def test_metrics_page_matches_the_catalogue() -> None:
    own = [family for family in families(everything(), ExpositionOptions()) if not family.name.startswith("DCGM_")]
    page = [*own, *ProcessMetrics().families()]
    assert {family.name for family in page} == {metric.name for metric in catalog.ALL}
    for family in page:
        metric = catalog.BY_NAME[family.name]
        assert (family.kind, family.help) == (metric.kind, metric.help)
        listed = [[label for label, _ in sample.pairs] for sample in samples_of(family)]
        if metric.prefixes:
            assert any(label.startswith(metric.prefixes) for order in listed for label in order), family.name
            listed = [[label for label in order if not label.startswith(metric.prefixes)] for order in listed]
        seen = {label for order in listed for label in order}
        assert seen <= set(metric.labels), family.name
        for order in listed:
            assert order == [label for label in metric.labels if label in order], family.name
        unused = set(metric.labels) - seen - {"gpu_instance", "mig_profile"}
        assert not unused, family.name


def test_families_are_in_catalogue_order() -> None:
    shown = [family.name for family in families(everything(), ExpositionOptions())]
    own = [name for name in shown if name in catalog.BY_NAME]
    assert own == [metric.name for metric in catalog.ALL if metric.name in own]


def test_unallocated_device_has_no_pod_series() -> None:
    view = DeviceView(gpu=exclusive().gpu, allocation=AllocationState.UNALLOCATED)
    empty = changed(snapshot(view), attribution={"unresolved": ()}, metering={"ledger": None})
    assert not [family.name for family in families(empty, ExpositionOptions()) if family.name.startswith("gpu_pod_")]


def test_catalogue_labels_do_not_clash_with_exported_label_prefixes() -> None:
    ours = {label for metric in catalog.ALL for label in metric.labels}
    assert not [label for label in ours if label.startswith(EXPORTED_PREFIXES)]
