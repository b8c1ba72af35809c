"""On-call panels: state of the exporters, and firing alerts."""

from panels import NODE_COLUMNS, RUNBOOK, Column, Panel, graph, grid, link, number, states
from promql import CLUSTER, NODES

INSTANCE = "cluster, instance, pod"
UP = f"(up{{{CLUSTER}}} and on (cluster, job, namespace, instance) instance:gpu_exporter_job:info{{{CLUSTER}}})"
"""``up`` of exporters, under any job name."""


def _of(name: str, by: str = INSTANCE) -> str:
    """Return a series of the exporter itself, by instance."""
    return f"max by ({by}) ({name}{{{CLUSTER}}})"


def exporters() -> list[Panel]:
    """Return the panels on the state of the exporters."""
    oldest = "time() - min({})"
    return [
        number(
            "Exporters up",
            "Exporters that Prometheus can scrape, and all exporter targets.",
            (f"sum({UP})", "up"),
            (f"count({UP})", "all"),
        ),
        number(
            "Oldest sample",
            "Age of the newest driver sample, for the exporter where it is oldest.",
            (oldest.format(_of("gpu_exporter_sample_timestamp_seconds")), ""),
            unit="s",
            bad_from=60,
        ),
        number(
            "Oldest attribution",
            "Age of the newest kubelet answer, for the exporter where it is oldest. The holders shown are as old.",
            (oldest.format(_of("gpu_exporter_attribution_timestamp_seconds")), ""),
            unit="s",
            bad_from=60,
        ),
        number(
            "Driver process restarts",
            "Restarts in the range of the child processes that call the driver.",
            (f"sum(increase(gpu_exporter_worker_restarts_total{{{CLUSTER}}}[$__range])) or vector(0)", ""),
            bad_from=3,
            decimals=0,
        ),
        number(
            "Dropped series",
            "Pod series left out of pages in the range because of --series-limit.",
            (f"sum(increase(gpu_exporter_dropped_series_total{{{CLUSTER}}}[$__range])) or vector(0)", ""),
            bad_from=1,
            decimals=0,
        ),
        number(
            "Simulated exporters",
            "Exporters with simulated GPUs and pods. Sums of a cluster with real and simulated exporters include both.",
            (f"sum({_of('gpu_exporter_simulated')}) or vector(0)", ""),
        ),
        grid(
            "Exporters",
            "One row per exporter: state, age of its snapshot, sample and attribution, and driver process restarts. "
            "Ages should stay near the sample interval.",
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
                Column("Value #A", "Up", texts={"0": "red", "1": "green"}),
                Column("Value #B", "Snapshot", "s"),
                Column("Value #C", "Sample", "s"),
                Column("Value #D", "Attribution", "s"),
                Column("Value #E", "Restarts"),
            ],
            sort="Up",
            ascending=True,
            none="No exporter is scraped",
        ).height(8),
        states(
            "Sources",
            "State of the sources of samples (nvml, dcgm), of holders (kubelet, slurm, host) and of owners "
            "(kubernetes-api).",
            (
                f"min by (cluster, instance, source) (gpu_exporter_source_up{{{CLUSTER}}})",
                "{{cluster}} {{instance}} {{source}}",
            ),
            texts={"0": ("down", "red"), "1": ("up", "green")},
            span=12,
        ),
        graph(
            "Errors by reason",
            "Errors of the exporters per second, by part and reason.",
            (
                f"sum by (part, reason) (rate(gpu_exporter_errors_total{{{CLUSTER}}}[$__rate_interval])) > 0",
                "{{part}}: {{reason}}",
            ),
            unit="ops",
            none="No errors",
        ),
    ]


def alerts() -> list[Panel]:
    """Return the panels on firing alerts."""
    firing = f'ALERTS{{alertname=~"GPU.*",alertstate="firing",severity!="none",{CLUSTER}}}'
    about = "alertname, severity, cluster, node, gpu, workload_namespace, workload_name, team"
    return [
        grid(
            "Firing alerts",
            "Alerts of these rules that fire in Prometheus now, also if Alertmanager inhibits or silences them.",
            [f"max by ({about}) ({firing})"],
            [
                Column("severity", "Severity", texts={"critical": "red", "warning": "orange", "info": "blue"}),
                Column("alertname", "Alert", links=(link("Runbook (search for the alert)", RUNBOOK),)),
                *NODE_COLUMNS,
                Column("gpu", "GPU"),
                Column("workload_namespace", "Namespace"),
                Column("workload_name", "Workload"),
                Column("team", "Team"),
            ],
            sort="Severity",
            ascending=True,
            none="No alert is firing",
            span=14,
        ),
        graph(
            "Alerts over time",
            "Number of firing alerts by name.",
            (f"count by (alertname, severity) ({firing})", "{{alertname}} {{severity}}"),
            stacked=True,
            none="No alert fired",
            span=10,
        ),
    ]
