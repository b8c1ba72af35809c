"""Writes docs/metrics.md from the catalogue and the DCGM table; ``--check`` only says whether it is up to date."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from exporter.metrics import catalog, health_collector
from exporter.metrics.dcgm_names import TABLE, DcgmField
from exporter.metrics.text_format import Kind
from exporter.service import metrics as metrics_catalog

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "metrics.md"
RECORDED = ROOT / "rules" / "src" / "recorded.md"

HEAD = """\
# Metrics

Made by `scripts/metrics_doc.py` from `exporter/metrics/catalog.py`, `dcgm_fields.txt`,
`exporter/service/metrics.py` and `rules/src/recorded.md`; do not edit.

A quantity that was not measured is absent: never 0, NaN or a guess. Activity of a device is also absent while
its readings contradict each other, and while only an unmeasured engine could be busy;
`gpu_exporter_errors_total{part="activity"}` counts each beginning (reasons `contradiction` and `incomplete`);
[troubleshooting.md](troubleshooting.md#what-is-counted) has the other parts and reasons. `/metrics` speaks text format
0.0.4 and OpenMetrics 1.0, as the client asks. A scrape shows the last sample and does no work in driver or kubelet:
`gpu_exporter_sample_timestamp_seconds` tells how old it is.
"""

LABELS = """\
Labels of every device series: {device}.
`gpu` is the index, `uuid` that of the GPU or MIG instance; `gpu_instance` and `mig_profile` are there on MIG instances
only. Pod series add {pod}; `pod_uid` and `container_name` only where they are known. Owner series have {owner}; what is
not known of an owner is absent. `workload_kind` is the workload's, or one of ours: `Unallocated` (nobody held it),
`Unattributed` (it is not known who held it).

`ledger` is the identity of the ledger that an owner's series is of. An identity is a promise: its series begin at 0,
never go back and have one writer; `gpu_ledger_created_timestamp_seconds` is the time at which it began. A node shows
one ledger as a rule. It shows another one while its state cannot be saved, after more than 2,000 owners, and for 25
hours after that. Sum over `ledger`.

`cost_labels` has the labels that `--cost-labels` names as `key=value` pairs, sorted by key and joined with commas:
`example.com/cost-center=42,project=llm`. It is absent where neither the pod nor its namespace has one of them. Beyond
200 combinations in a ledger each value is `__other__`: [owners.md](owners.md#costs-by-label).

`gpu_pod_info` says whose a pod is in the ledger's words: join other pod series to it on the pod labels. Without
`--kube-metadata on`, and until a pod's workload is known, `workload_namespace` is all. Labels and annotations that
`--pod-labels` and `--pod-annotations` allow stand on `gpu_pod_info` alone, as `label_<key>` and `annotation_<key>`.
None of these collides with a target label of Prometheus, so `honorLabels` makes no difference. The tables list the
labels that a metric has beside those.

`increase()` and `rate()` do not count the first value of a series. With `gpu_pod_*_total` that is 29 % of the time of
pods under 60 s ([accuracy.md](accuracy.md#gpu-seconds-through-a-real-prometheus)). Ask the ledger for totals. A pod's
counters begin at 0 with the pod, so of one of them, `M`, subtract the value before the window, or 0:
`last_over_time(M[1d]) - (last_over_time(M[15m] offset 1d) or 0 * last_over_time(M[1d]))`. Pages have no `_created`
lines: Prometheus stores them as more series, unless it runs with `created-timestamp-zero-ingestion`.

An owner's series is there from its first second, joule or cent on. With `--state-dir`, what a ledger shows has been
saved: its counters do not go back when the agent is killed. Money is in the currency of the
price book, at the price of the moment; where there was no price there is no series, rather than 0. Do not add up
currencies.
"""

NOW = """\
Owner series of the present are per node, and alert rules read them without a join on devices. Their labels: {workload}.
The labels of a pool: {pool}.

A pod whose workload is not known is its own owner, with the kind `Pod`. GPUs are weighted by share. A window ends now.
It includes an owner's ended pods, moves with a pod to its owner when that becomes known, and with `--state-dir`
continues after a restart of the agent in the same boot (`windows.json`, saved once a minute). The agent makes these
figures every 15 seconds, and at once when the holders change.
"""

SERVICE = """\
## Cost service

What `gpu-cost-exporter serve` shows at `/metrics`, with the `process_` and `python_` metrics of above. Its money is of
whole hours: it grows once an hour. The budget alerts read its budget series: [runbook](runbook.md#gpubudgetburn).
Labels of every budget series, of which the last three are there where the budget is for one of these:
{budget}.
"""

DROP_IN = """\
## Drop-in family

Names, types, units and labels of dcgm-exporter's default file: those of its releases up to 4.8 (`--dcgm-names legacy`,
the default) or of 4.9 (`--dcgm-names 4.9`). A collectors file (`--collectors`) takes any name or id of the tables, DCGM
4.6's names and those of dcgm-exporter's 1.x file; the name that is written is the name that is printed, and it decides
the unit. It takes every other field of DCGM that is of a GPU, of an instance or of the node, too, under dcgm-exporter's
name, DCGM 4.6's or by number (`exporter/metrics/dcgm_ids.txt`): DCGM alone measures those, in units of its own, so
they need `--dcgm-address`. Fields of vGPUs, NVSwitches, single links, CPUs and network cards, and binary ones, are
warned of and show nothing.

`--collectors wide` is a preset (`exporter/metrics/collectors-wide.csv`): the default set, and what the public
dashboards of GKE, OKE and OpenShift and the GPU operator's rules read in addition: SM activity and occupancy, FP64,
FP32 and FP16 pipes, NVLink rates, `FB_TOTAL`, limits of clocks, power and temperature, throttling, ECC and NVLink
errors, the health status, counts of Xids and clock events. On Hopper and later NVML measures all of it. Panels that
read kube-state-metrics (`kube_node_status_capacity`, `kube_node_status_condition`, which OKE's node problem detector
sets) or node-exporter (InfiniBand, CPU) stay empty without these.

Labels, in this order: `gpu`, `UUID`, `pci_bus_id`, `device`, `modelName`, on MIG rows `GPU_I_PROFILE` and `GPU_I_ID`,
then `Hostname` (`hostname` with 4.9 names; `--hostname-label` decides), the label rows, and where one container holds
the whole device `container` (where it is known), `namespace`, `pod`, and on request (`--dcgm-pod-uid`) `pod_uid`.
`--dcgm-old-labels`, `--dcgm-model-hyphens` and `--hostname-label none` do what dcgm-exporter's `--use-old-namespace`,
`--replace-blanks-in-model-name` and `--no-hostname` do.

What differs from dcgm-exporter, on purpose:

- A value of the whole board (power, temperature, clocks, energy) stands once, on the board's row. dcgm-exporter copies
  it to every MIG instance. MIG rows show what was measured on the instance: the fields marked MIG below; the row of
  the board leaves those out, so that a sum over all rows is right.
- A shared device has one row without a pod per field, and one row per holder only for what was measured per holder.
  dcgm-exporter copies the device's value to every holder. A sum over all rows of `GPU_UTIL` or `FB_USED` counts a
  shared device twice, there as here: filter `pod!=""` or `pod=""`.
- A GPU that does not answer has no rows here; `gpu_up` tells.
- `GPU_CI_ID` is added where several compute instances share a GPU instance, which would else be the same series twice.
  They have its memory together, so none of them has memory rows; their holders have the memory of their processes.
- `DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL` is a rate and typed gauge, as in 4.8.3 and later; up to 4.8.2 it was a counter.
  4.9's `DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND` measures something else and is absent.
- `DCGM_FI_DEV_GPU_UTIL_RATIO` is 0-1, as in 4.9. DCGM 4.6 used that name for percent.
- In OpenMetrics, counters whose name does not end in `_total` are typed `unknown`, as that format demands.
- OpenCost finds an exporter by a pod label that contains `dcgm-exporter` and by port 9400, and reads only
  `DCGM_FI_PROF_GR_ENGINE_ACTIVE` and `DCGM_FI_DEV_DEC_UTIL` with a container: give the pods such a label, keep
  `DEC_UTIL` in the collectors file, and expect it to see whole GPUs and, by their engine, MIG instances of one holder
  each. Of a shared GPU each holder has its part of the engine, where the engine is measured (Hopper and later, or DCGM)
  and the driver tells whose processes use it; nothing measures the decoder per holder, or on a MIG instance.
- Parts of a percentage stay fractions on a holder's row; dcgm-exporter shows whole numbers.
"""

EVENTS = """\
### Counts of dcgm-exporter's own, on request

In a collectors file, with its labels beside those of the family; the type that is printed is the one that is true.

{table}
What differs from dcgm-exporter, on purpose:

- A sample is one of this agent's, one per `--sample-interval`; dcgm-exporter's own interval is 30 s by default. A count
  of clock events is so many times higher; its share of the window is the same.
- Clock events stand on the row of the board, not again on each MIG instance. An Xid stands on one row: that of the MIG
  instance it is of; on the board's row where that instance is not listed, or where several compute instances share a
  GPU instance and the event names none of them.
- A window moves on by a 60th of its length. What was before the agent's start is in none.
- The totals start with the agent; a reason that holds clocks down at the start counts once it begins again.
  `gpu_xid_errors_total` and `gpu_clock_events_total` are the same without a collectors file.
- A GPU that does not answer keeps its Xids: they may say why. It has no row that says 0.
- `DCGM_EXP_GPU_HEALTH_STATUS` is derived, not read from DCGM's health check: the watches `ALL`, `MEM`, `NVLINK` and
  `INFOROM` from Xids of the window of `--xid-count-window`, `MEM` also from row remapping, `DRIVER` from the recovery
  action; the worst of each. A lost GPU fails `ALL`. The other watches are absent: nothing is known of them here.
- `DCGM_EXP_P2P_STATUS` is not made: a row is warned of with what to use instead.
"""


def document() -> str:
    """The whole page."""
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
    for count in health_collector.EventCount:
        row = health_collector.row(count, "")
        own = ("clock_event",) if "CLOCK" in count else ("xid",)
        if count is health_collector.EventCount.HEALTH:
            own = ("health_error_code", "health_watch")
        window = ("window_size_in_ms",) if count in health_collector.RECENT else ()
        rows.append((f"`{row.name}`", row.kind, _code(sorted((*own, *window))), row.help))
    head = ("Metric", "Type", "Labels", "Meaning")
    return "".join(_line(cells) + "\n" for cells in (head, tuple("---" for _ in head), *rows))


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def lines() -> Iterator[str]:
        yield title
        yield ""
        yield _line(head)
        yield _line(tuple("---" for _ in head))
        for row in rows:
            yield _line(row)
        yield ""

    return "\n".join(lines())


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it; 1 where it is out of date."""
    text = document()
    if "--check" in arguments:
        if TARGET.exists() and TARGET.read_text() == text:
            return 0
        print("docs/metrics.md is out of date: run `python scripts/metrics_doc.py` and look at the difference")
        return 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
