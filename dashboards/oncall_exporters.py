"""Panels of on-call: whether the exporters see, and which alerts fire."""

from panels import NODE_COLUMNS, RUNBOOK, Column, Panel, graph, grid, link, number, states
from promql import CLUSTER, NODES

INSTANCE = "cluster, instance, pod"
UP = f"(up{{{CLUSTER}}} and on (cluster, job, namespace, instance) instance:gpu_exporter_job:info{{{CLUSTER}}})"
"""Of exporters only, by whichever job they are scraped."""


def _of(name: str, by: str = INSTANCE) -> str:
    """An exporter's own series, by where it runs."""
    return f"max by ({by}) ({name}{{{CLUSTER}}})"


def exporters() -> list[Panel]:
    """How each exporter is."""
    oldest = "time() - min({})"
    return [
        number(
            "Exporters that answer",
            "Exporters that Prometheus can scrape, and all that it has as targets.",
            (f"sum({UP})", "answer"),
            (f"count({UP})", "all"),
        ),
        number(
            "Oldest reading",
            "Age of the oldest exporter's newest reading of its driver.",
            (oldest.format(_of("gpu_exporter_sample_timestamp_seconds")), ""),
            unit="s",
            bad_from=60,
        ),
        number(
            "Oldest attribution",
            "Age of the oldest answer of a kubelet: who holds what is as old.",
            (oldest.format(_of("gpu_exporter_attribution_timestamp_seconds")), ""),
            unit="s",
            bad_from=60,
        ),
        number(
            "Restarts of readers",
            "Times in the range that a child process that owns the driver was started again.",
            (f"sum(increase(gpu_exporter_worker_restarts_total{{{CLUSTER}}}[$__range])) or vector(0)", ""),
            bad_from=3,
            decimals=0,
        ),
        number(
            "Series left out",
            "Pod series left out of pages in the range, because of --series-limit.",
            (f"sum(increase(gpu_exporter_dropped_series_total{{{CLUSTER}}}[$__range])) or vector(0)", ""),
            bad_from=1,
            decimals=0,
        ),
        number(
            "Simulated exporters",
            "Exporters whose GPUs and pods do not exist. Beside real ones their numbers are added up with the real.",
            (f"sum({_of('gpu_exporter_simulated')}) or vector(0)", ""),
        ),
        grid(
            "Exporters",
            "One row for each: whether it answers, how old its picture, its readings and its attribution are, and how "
            "often its reader was started again. Ages should stay near the sample interval.",
            [
                f"max by ({INSTANCE}) ({UP})",
                f"time() - {_of('gpu_exporter_snapshot_timestamp_seconds')}",
                f"time() - {_of('gpu_exporter_sample_timestamp_seconds')}",
                f"time() - {_of('gpu_exporter_attribution_timestamp_seconds')}",
                f"sum by ({INSTANCE}) (gpu_exporter_worker_restarts_total{{{CLUSTER}}})",
                f"count by ({INSTANCE}, node) (gpu_devices{{{NODES}}})",
            ],
            [
                Column("cluster", "Cluster"),
                Column("node", "Node"),
                Column("instance", "Instance"),
                Column("pod", "Pod"),
                Column("Value #A", "Answers", texts={"0": "red", "1": "green"}),
                Column("Value #B", "Picture", "s"),
                Column("Value #C", "Readings", "s"),
                Column("Value #D", "Attribution", "s"),
                Column("Value #E", "Restarts"),
            ],
            sort="Answers",
            ascending=True,
            none="No exporter is scraped",
        ).height(8),
        states(
            "Sources",
            "1 while a source of readings (nvml, dcgm), of holders (kubelet, slurm, host) or of owners "
            "(kubernetes-api) works.",
            (
                f"min by (cluster, instance, source) (gpu_exporter_source_up{{{CLUSTER}}})",
                "{{cluster}} {{instance}} {{source}}",
            ),
            texts={"0": ("down", "red"), "1": ("up", "green")},
            span=12,
        ),
        graph(
            "Errors by reason",
            "What went wrong in the exporters, by part and reason, per second.",
            (
                f"sum by (part, reason) (rate(gpu_exporter_errors_total{{{CLUSTER}}}[$__rate_interval])) > 0",
                "{{part}}: {{reason}}",
            ),
            unit="ops",
            none="No errors",
        ),
    ]


def alerts() -> list[Panel]:
    """What fires."""
    firing = f'ALERTS{{alertname=~"GPU.*",alertstate="firing",severity!="none",{CLUSTER}}}'
    about = "alertname, severity, cluster, node, gpu, workload_namespace, workload_name, team"
    return [
        grid(
            "Alerts that fire",
            "Alerts of these rules, as Prometheus has them now; what Alertmanager holds back is here too.",
            [f"max by ({about}) ({firing})"],
            [
                Column("severity", "Severity", texts={"critical": "red", "warning": "orange", "info": "blue"}),
                Column("alertname", "Alert", links=(link("Runbook: find the alert's heading", RUNBOOK),)),
                *NODE_COLUMNS,
                Column("gpu", "GPU"),
                Column("workload_namespace", "Namespace"),
                Column("workload_name", "Workload"),
                Column("team", "Team"),
            ],
            sort="Severity",
            ascending=True,
            none="No alert fires",
            span=14,
        ),
        graph(
            "Alerts over time",
            "How many fire, by alert.",
            (f"count by (alertname, severity) ({firing})", "{{alertname}} {{severity}}"),
            stacked=True,
            none="No alert fired",
            span=10,
        ),
    ]
