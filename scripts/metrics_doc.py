"""Writes docs/metrics.md from the catalogue and the DCGM table; ``--check`` compares."""

import sys
from collections.abc import Iterable

from generated import ROOT, markdown_table, write_or_check

from exporter.metrics import catalog, dcgm_names
from exporter.metrics.dcgm_names import TABLE, DcgmField
from exporter.metrics.text_format import Kind
from exporter.service import metrics as metrics_catalog

RECORDED = ROOT / "rules" / "src" / "recorded.md"

HEAD = """\
# Metrics

Made by `scripts/metrics_doc.py` from `exporter/metrics/catalog.py`, `dcgm_fields.txt`,
`exporter/service/metrics.py` and `rules/src/recorded.md`; do not edit.

A quantity that was not measured is absent: never 0, NaN or a guess. Activity of a device is also absent while
its readings contradict each other, and while only an unmeasured engine could be busy. Effective time is absent while
a resource of the device is not measured ([effective.md](effective.md)).
`gpu_exporter_errors_total{part="activity"}` counts each beginning (`contradiction`, `incomplete`,
`impossible_profile`); [troubleshooting.md](troubleshooting.md#what-is-counted) has the other parts and reasons.
`/metrics` supports text format 0.0.4 and OpenMetrics 1.0. A scrape shows the last sample and calls neither driver nor
kubelet; `gpu_exporter_sample_timestamp_seconds` is the time of the sample.
"""

LABELS = """\
Labels of every device series: {device}.
`gpu` is the index, `uuid` that of the GPU or MIG instance; only MIG instances have `gpu_instance` and `mig_profile`.
Pod series add {pod}; `pod_uid` and `container_name` only if known. Owner series have {owner}; unknown labels of an
owner are absent. `workload_kind` is the workload's, or one of ours: `Unallocated` (no holder), `Unattributed` (unknown
holder).

`ledger` is the identity of an owner series' ledger. An identity is a promise: its series start at 0, never decrease and
have one writer; `gpu_ledger_created_timestamp_seconds` is its begin. A node usually shows one ledger. It shows another
one while its state cannot be saved, after more than 2,000 owners, and for 25 hours after that. Sum over `ledger`.

`cost_labels` has the labels of `--cost-labels` as `key=value` pairs, sorted by key and joined with commas:
`example.com/cost-center=42,project=llm`. It is absent if neither the pod nor its namespace has one of them. Beyond
200 combinations in a ledger each value is `__other__`: [owners.md](owners.md#costs-by-label).

`gpu_pod_info` has the owner of a pod with the ledger's labels: join other pod series to it on the pod labels. Without
`--kube-metadata on`, and until a pod's workload is known, it has only `workload_namespace`. Only `gpu_pod_info` has the
labels and annotations of `--pod-labels` and `--pod-annotations`, as `label_<key>` and `annotation_<key>`. None of these
collides with a target label of Prometheus, so `honorLabels` has no effect. The tables list additional labels.

`increase()` and `rate()` do not count the first value of a series. With `gpu_pod_*_total` that is 29 % of the time of
pods under 60 s ([accuracy.md](accuracy.md#gpu-seconds-through-a-real-prometheus)). Use the ledger for totals. A pod's
counters start at 0 with the pod, so subtract from a counter `M` its value before the window, or 0:
`last_over_time(M[1d]) - (last_over_time(M[15m] offset 1d) or 0 * last_over_time(M[1d]))`. Pages have no `_created`
lines: Prometheus stores them as more series, unless it runs with `created-timestamp-zero-ingestion`.

An owner's series starts with its first second, joule or cent. With `--state-dir`, a ledger shows saved values only: its
counters do not decrease when the agent is killed. Money is in the currency of the price book, at the price of each
second; without a price the series is absent. Do not add currencies.
"""

NOW = """\
Owner series of the present are per node, and alert rules read them without a join on devices. Their labels: {workload}.
The labels of a pool: {pool}.

A pod with an unknown workload is its own owner, with the kind `Pod`. GPUs are weighted by share. A window ends now.
It includes an owner's ended pods and moves with a pod to its owner. With `--state-dir` it continues after a restart of
the agent in the same boot (`windows.json`, saved once a minute). The agent computes these figures every 15 seconds, and
at once when the holders change.
"""

SERVICE = """\
## Cost service

Series of `gpu-cost-exporter serve` at `/metrics`, in addition to the `process_` and `python_` metrics above. Money is
that of whole hours. The budget alerts read the budget series: [runbook](runbook.md#gpubudgetburn).
Labels of every budget series (the last three only if the budget has them):
{budget}.
"""

DROP_IN = """\
## Drop-in family

Names, types, units and labels are those of dcgm-exporter's default file: of its releases up to 4.8 (`--dcgm-names
legacy`, the default) or of 4.9 (`--dcgm-names 4.9`). A collectors file (`--collectors`) accepts any name or id of the
tables, DCGM 4.6's names and those of dcgm-exporter's 1.x file; its spelling is exported and selects the unit. It also
accepts every other DCGM field of a GPU, an instance or the node, by dcgm-exporter's name, DCGM 4.6's or number
(`exporter/metrics/dcgm_ids.txt`). Only DCGM measures those, in its units, so they need `--dcgm-address`. Fields of
vGPUs, NVSwitches, single links, CPUs and network cards, and binary ones, cause a warning and are absent.

`--collectors wide` is a preset (`exporter/metrics/collectors-wide.csv`): the default set, and the fields of the public
dashboards of GKE, OKE and OpenShift and of the GPU operator's rules. These are SM activity and occupancy, FP64, FP32
and FP16 pipes, NVLink rates, `FB_TOTAL`, and limits of clocks, power and temperature; and throttling, ECC and NVLink
errors, the health status, counts of Xids and clock events. On Hopper and later NVML measures all of it. Panels that
read kube-state-metrics (`kube_node_status_capacity`, `kube_node_status_condition`) or node-exporter need both.

Labels, in this order: `gpu`, `UUID`, `pci_bus_id`, `device`, `modelName`, on MIG rows `GPU_I_PROFILE` and `GPU_I_ID`,
then `Hostname` (`hostname` with 4.9 names; `--hostname-label`), the label rows, and for a device with one holder
`container` (if known), `namespace`, `pod`, and on request (`--dcgm-pod-uid`) `pod_uid`. `--dcgm-old-labels`,
`--dcgm-model-hyphens` and `--hostname-label none` are dcgm-exporter's `--use-old-namespace`,
`--replace-blanks-in-model-name` and `--no-hostname`.

Deliberate differences to dcgm-exporter:

- A value of the whole board (power, temperature, clocks, energy) appears once, on the board's row; dcgm-exporter copies
  it to every MIG instance. MIG rows show the fields marked MIG below, measured on the instance. The board's row leaves
  those out, so a sum over all rows is right.
- A shared device has one row without a pod per field, and rows per holder only for values measured per holder.
  dcgm-exporter copies the device's value to every holder. A sum over all rows of `GPU_UTIL` or `FB_USED` counts a
  shared device twice with both exporters: filter `pod!=""` or `pod=""`.
- A GPU that does not answer has no rows; see `gpu_up`.
- `GPU_CI_ID` is added if several compute instances share a GPU instance, to keep their series distinct. They share its
  memory, so none of them has memory rows; their holders have the memory of their processes.
- `DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL` is a rate and typed gauge, as in 4.8.3 and later; up to 4.8.2 it was a counter.
  4.9's `DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND` measures something else and is absent.
- `DCGM_FI_DEV_GPU_UTIL_RATIO` is 0-1, as in 4.9. DCGM 4.6 used that name for percent.
- In OpenMetrics, counters without the suffix `_total` are typed `unknown`, as that format requires.
- OpenCost finds an exporter by port 9400 and a pod label that contains `dcgm-exporter`. It reads only
  `DCGM_FI_PROF_GR_ENGINE_ACTIVE` and `DCGM_FI_DEV_DEC_UTIL` with a container: keep `DEC_UTIL` in the collectors file.
  It sees whole GPUs and, by their engine, MIG instances of one holder each. Each holder of a shared GPU has its part of
  the engine, if the engine is measured (Hopper and later, or DCGM) and the driver lists the processes. No source
  measures the decoder per holder or MIG instance.
- Parts of a percentage stay fractions on a holder's row; dcgm-exporter shows whole numbers.
"""

EVENTS = """\
### Counts of dcgm-exporter's own, on request

In a collectors file, with these labels in addition to those of the family. The exported type is the correct one.

{table}
Deliberate differences to dcgm-exporter:

- A sample is one of this agent's, one per `--sample-interval`; dcgm-exporter's default interval is 30 s. A count of
  clock events is higher by that factor; its share of the window is the same.
- Clock events appear on the board's row only. An Xid appears on one row: that of its MIG instance, or the board's if
  that instance is not listed, or if several compute instances share a GPU instance and the event has none of them.
- A window advances by a 60th of its length and starts with the agent.
- The totals start with the agent; a reason that is active at the start counts at its next begin.
  `gpu_xid_errors_total` and `gpu_clock_events_total` are the same without a collectors file.
- A GPU that does not answer keeps its Xids. It has no row with 0.
- `DCGM_EXP_GPU_HEALTH_STATUS` is derived, not read from DCGM's health check: the watches `ALL`, `MEM`, `NVLINK` and
  `INFOROM` from Xids of the window of `--xid-count-window`, `MEM` also from row remapping, `DRIVER` from the recovery
  action; the worst of each. A lost GPU fails `ALL`. The other watches are absent, because no data exist.
- `DCGM_EXP_P2P_STATUS` is not available: its row causes a warning with the alternative.
"""


def document() -> str:
    """Return the page."""
    parts = [
        HEAD,
        "## Own family\n\n"
        + LABELS.format(
            device=_code(catalog.DEVICE_LABELS), pod=_code(catalog.POD_LABELS), owner=_code(catalog.OWNER_LABELS)
        ),
        _own("Devices", [metric for metric in catalog.ALL if _level(metric) == "device"]),
        _own("Pods", [metric for metric in catalog.ALL if _level(metric) == "pod"]),
        _own("Owners: the ledger", [metric for metric in catalog.ALL if _level(metric) == "owner"]),
        _own(
            "Owners and pools: now",
            [metric for metric in catalog.ALL if _level(metric) == "now"],
            NOW.format(workload=_code(catalog.WORKLOAD_LABELS), pool=_code(catalog.POOL_LABELS)),
        ),
        _own("The exporter itself", [metric for metric in catalog.ALL if _level(metric) == "itself"]),
        RECORDED.read_text(encoding="utf-8"),
        SERVICE.format(budget=_code(metrics_catalog.BUDGET_LABELS)),
        _own("Money and budgets", [metric for metric in metrics_catalog.OWN if not _is_about_service(metric)]),
        _own("The service itself", [metric for metric in metrics_catalog.OWN if _is_about_service(metric)]),
        DROP_IN,
        EVENTS.format(table=_events()),
        _fields("Default set", [row for row in TABLE if row.default or row.new_default]),
        _fields("On request, in a collectors file", [row for row in TABLE if not (row.default or row.new_default)]),
    ]
    return "\n".join(parts)


def _level(metric: catalog.Metric) -> str:
    if metric.name.startswith("gpu_pod_"):
        return "pod"
    if metric.name.startswith("gpu_ledger_"):
        return "owner"
    if metric.name.startswith(("gpu_owner_", "gpu_pool_", "gpu_shared_")):
        return "now"
    return "itself" if metric.name.startswith(("gpu_exporter_", "process_", "python_")) else "device"


def _is_about_service(metric: catalog.Metric) -> bool:
    return metric.name.startswith("gpu_cost_service_")


def _own(title: str, metrics: Iterable[catalog.Metric], text: str = "") -> str:
    levels = (
        (*catalog.DEVICE_LABELS, *catalog.POD_LABELS),
        catalog.DEVICE_LABELS,
        catalog.OWNER_LABELS,
        catalog.WORKLOAD_LABELS,
        catalog.POOL_LABELS,
        metrics_catalog.BUDGET_LABELS,
    )
    rows = []
    for metric in metrics:
        usual = next((level for level in levels if set(level) <= set(metric.labels)), ())
        more = [label for label in metric.labels if label not in usual]
        more += [f"{prefix}*" for prefix in metric.prefixes]
        rows.append((f"`{metric.name}`", metric.kind, _code(more), metric.help))
    head = f"### {title}" + (f"\n\n{text.rstrip()}" if text else "")
    return _table(head, ("Metric", "Type", "Labels", "Meaning"), rows)


def _fields(title: str, fields: Iterable[DcgmField]) -> str:
    rows = []
    for row in fields:
        new = "absent" if row.new_name is None else "same" if row.new_name == row.legacy_name else f"`{row.new_name}`"
        unit = row.unit if row.new_unit == row.unit else f"{row.unit}; {row.new_unit}"
        where = "whole" if row.kind is Kind.LABEL or not row.per_instance else "whole, MIG"
        rows.append((str(int(row.field)), f"`{row.legacy_name}`", new, row.kind, unit, where, row.help))
    return _table(f"### {title}", ("Id", "Up to 4.8", "4.9", "Type", "Unit; in 4.9", "Rows", "Meaning"), rows)


def _events() -> str:
    rows = []
    for count in dcgm_names.EventCount:
        row = dcgm_names.event_metric(count, "")
        own = ("clock_event",) if "CLOCK" in count else ("xid",)
        if count is dcgm_names.EventCount.HEALTH:
            own = ("health_error_code", "health_watch")
        window = ("window_size_in_ms",) if count.endswith("_COUNT") else ()
        rows.append((f"`{row.name}`", row.kind, _code(sorted((*own, *window))), row.help))
    head = ("Metric", "Type", "Labels", "Meaning")
    return "".join(f"{line}\n" for line in markdown_table(head, rows))


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join([title, "", *markdown_table(head, rows), ""])


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.exit(write_or_check({ROOT / "docs" / "metrics.md": document()}))
