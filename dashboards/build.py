"""Builds fleet.json with the Grafana foundation SDK; ``--check`` only compares it with what is committed."""

import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

TARGET = Path(__file__).resolve().parent / "fleet.json"
DATASOURCE = dashboard_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
NODES = 'node=~"$node"'
PODS = 'node=~"$node",pod_namespace=~"$namespace"'
# One series per physical GPU or MIG instance that can be held, whichever labels Prometheus adds.
DEVICE = "cluster, node, uuid, gpu_instance"
HOLDER = "cluster, node, uuid, gpu_instance, pod_namespace, pod_name, container_name"

Panel = stat.Panel | timeseries.Panel | table.Panel


def query(expression: str, legend: str = "", *, instant: bool = False) -> prometheus.Dataquery:
    """One target of a panel; ``instant`` asks for the newest value only."""
    target = prometheus.Dataquery().datasource(DATASOURCE).expr(expression).legend_format(legend or "__auto")
    if instant:
        return target.instant().format(prometheus_models.PromQueryFormat.TABLE)
    return target.range()


def number(
    title: str, description: str, expression: str, *, unit: str = "short", bad_from: float | None = None
) -> stat.Panel:
    """A single number; red from ``bad_from`` up."""
    steps = [dashboard_models.Threshold(value=None, color="green")]
    if bad_from is not None:
        steps.append(dashboard_models.Threshold(value=bad_from, color="red"))
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .no_value("-")
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .thresholds(dashboard.ThresholdsConfig().mode(dashboard_models.ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(query(expression, title))
        .height(4)
        .span(4)
    )


def graph(
    title: str, description: str, *targets: tuple[str, str], unit: str = "short", stacked: bool = False, span: int = 12
) -> timeseries.Panel:
    """Lines over time; ``targets`` are (expression, legend)."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .fill_opacity(20 if stacked else 5)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .height(8)
        .span(span)
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if unit == "percentunit" and not stacked:
        panel = panel.max(1)
    for expression, legend in targets:
        panel = panel.with_target(query(expression, legend))
    return panel


def idle_table() -> table.Panel:
    """Pods by how long they have left their devices idle."""
    by_pod = "cluster, node, pod_namespace, pod_name"
    return (
        table.Panel()
        .title("Idle pods")
        .description(
            "Pods whose devices have all been below the idle threshold, longest first. GPUs are counted by share. "
            "Unknown activity is not idle: such pods are not here."
        )
        .datasource(DATASOURCE)
        .with_target(query(f"min by ({by_pod}) (gpu_pod_idle_for_seconds{{{PODS}}}) > 60", instant=True))
        .with_target(query(f"sum by ({by_pod}) (max by ({HOLDER}) (gpu_pod_share_ratio{{{PODS}}}))", instant=True))
        .with_target(query(f"min by ({by_pod}) (gpu_pod_age_seconds{{{PODS}}})", instant=True))
        .with_transformation(dashboard_models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            dashboard_models.DataTransformerConfig(
                id_val="filterByValue",
                options={
                    "type": "include",
                    "match": "all",
                    "filters": [{"fieldName": "Value #A", "config": {"id": "isNotNull", "options": {}}}],
                },
            )
        )
        .with_transformation(
            dashboard_models.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {"Time": True, "cluster": True},
                    "indexByName": {
                        "pod_namespace": 0,
                        "pod_name": 1,
                        "node": 2,
                        "Value #B": 3,
                        "Value #A": 4,
                        "Value #C": 5,
                    },
                    "renameByName": {
                        "pod_namespace": "Namespace",
                        "pod_name": "Pod",
                        "node": "Node",
                        "Value #A": "Idle for",
                        "Value #B": "GPUs",
                        "Value #C": "Held for",
                    },
                },
            )
        )
        .unit("s")
        .override_by_name("GPUs", [dashboard_models.DynamicConfigValue(id_val="unit", value="short")])
        .sort_by([common.TableSortByFieldState().display_name("Idle for").desc(desc=True)])
        .height(9)
        .span(24)
    )


def rows() -> list[tuple[str, list[Panel]]]:
    """Everything on the dashboard, by row."""
    allocated = f'max by ({DEVICE}) (gpu_allocation_state{{{NODES},state="%s"}})'
    activity = f"max by ({HOLDER}) (gpu_pod_activity_ratio{{{PODS}}})"
    share = f"max by ({HOLDER}) (gpu_pod_share_ratio{{{PODS}}})"
    overview: list[Panel] = [
        number(
            "GPUs", "Physical GPUs that answer their driver.", f"sum(max by (cluster, node, uuid) (gpu_up{{{NODES}}}))"
        ),
        number(
            "GPUs down",
            "Lost, missing, or in need of a reset.",
            f"count(max by (cluster, node, uuid) (gpu_up{{{NODES}}}) == 0) or vector(0)",
            bad_from=1,
        ),
        number(
            "GPUs held", "By pods, counted by share: a MIG instance or a replica is a part of a GPU.", f"sum({share})"
        ),
        number(
            "Devices unallocated",
            "Whole GPUs and MIG instances that no pod holds.",
            f"sum({allocated % 'unallocated'})",
        ),
        number(
            "GPUs idle",
            "Held by workloads that the rule of GPUUnderutilised finds idle, on all nodes; counted by share.",
            'sum(workload:gpu_underused:sum{workload_namespace=~"$namespace"}) or vector(0)',
            bad_from=1,
        ),
        number(
            "Devices unknown",
            "The kubelet could not be asked who holds them.",
            f"sum({allocated % 'unknown'})",
            bad_from=1,
        ),
    ]
    use: list[Panel] = [
        graph(
            "Devices by allocation",
            "Whole GPUs and MIG instances; unknown: the kubelet could not be asked.",
            *((f"sum({allocated % state})", state) for state in ("allocated", "unallocated", "unknown")),
            stacked=True,
        ),
        graph(
            "Activity by namespace",
            "Mean activity of the devices that a namespace's pods hold. A gap is unknown, not 0.",
            (f"avg by (pod_namespace) ({activity})", "{{pod_namespace}}"),
            unit="percentunit",
        ),
        graph(
            "Activity by pod",
            "Each holder's part of its device's activity, averaged over the pod's devices.",
            (f"avg by (pod_namespace, pod_name) ({activity})", "{{pod_namespace}}/{{pod_name}}"),
            unit="percentunit",
        ),
        graph(
            "Memory by pod",
            "Device memory used by the pod's processes.",
            (
                f"sum by (pod_namespace, pod_name) (max by ({HOLDER}) (gpu_pod_memory_used_bytes{{{PODS}}}))",
                "{{pod_namespace}}/{{pod_name}}",
            ),
            unit="bytes",
            stacked=True,
        ),
        graph(
            "Memory of the GPUs",
            "Used and total, of whole boards.",
            (f'sum(max by (cluster, node, uuid) (gpu_memory_used_bytes{{{NODES},gpu_instance=""}}))', "used"),
            (f'sum(max by (cluster, node, uuid) (gpu_memory_total_bytes{{{NODES},gpu_instance=""}}))', "total"),
            unit="bytes",
        ),
        graph(
            "Power by node",
            "Drawn by the boards; no host power.",
            (f"sum by (node) (max by (cluster, node, uuid) (gpu_power_watts{{{NODES}}}))", "{{node}}"),
            unit="watt",
            stacked=True,
        ),
    ]
    health: list[Panel] = [
        graph(
            "Age of the picture",
            "Time since each exporter looked; it should stay near its sample interval.",
            ("time() - max by (instance) (gpu_exporter_snapshot_timestamp_seconds)", "{{instance}}"),
            unit="s",
            span=8,
        ),
        graph(
            "Sources",
            "1 while a source of readings (nvml) or of attribution (kubelet) works.",
            ("min by (instance, source) (gpu_exporter_source_up)", "{{instance}} {{source}}"),
            span=8,
        ),
        graph(
            "Errors",
            "What went wrong, by part and reason.",
            ("sum by (part, reason) (rate(gpu_exporter_errors_total[$__rate_interval])) > 0", "{{part}}: {{reason}}"),
            unit="ops",
            span=8,
        ),
    ]
    return [("Overview", overview), ("Use", use), ("Idle", [idle_table()]), ("Exporter", health)]


def variable(name: str, label: str, expression: str) -> dashboard.QueryVariable:
    """A multi-value variable filled by a label query."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": expression, "refId": "values"})
        .refresh(dashboard_models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard_models.VariableSort.ALPHABETICAL_ASC)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
    )


def build() -> dict[str, Any]:
    """Give the dashboard as JSON values, with unique panel and target ids, which the SDK leaves out."""
    builder = (
        dashboard.Dashboard("GPU fleet")
        .uid("gpu-cost-fleet")
        .description("Who holds which GPU, whether it works, and since when it is idle.")
        .tags(["gpu", "gpu-cost-exporter"])
        .readonly()
        .timezone("browser")
        .refresh("30s")
        .time("now-3h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(variable("node", "Node", "label_values(gpu_info, node)"))
        .with_variable(variable("namespace", "Namespace", f"label_values(gpu_pod_info{{{NODES}}}, pod_namespace)"))
        .link(
            dashboard.DashboardLink("GPU dashboards")
            .type(dashboard_models.DashboardLinkType.DASHBOARDS)
            .tags(["gpu-cost-exporter"])
            .as_dropdown(as_dropdown=True)
            .keep_time(keep_time=True)
        )
    )
    for title, panels in rows():
        builder = builder.with_row(dashboard.Row(title))
        for panel in panels:
            builder = builder.with_panel(panel)
    values: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(builder.build()))
    for number_, panel in enumerate(values["panels"], start=1):
        panel["id"] = number_
        for letter, target in zip("ABCDEFGH", panel.get("targets", ()), strict=False):
            target["refId"] = letter
    return values


def main() -> int:
    """Write or compare; exit code 1 when ``--check`` finds a difference."""
    wanted = json.dumps(build(), indent=1, sort_keys=True) + "\n"
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(wanted, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == wanted:
        return 0
    sys.stderr.write("dashboards/fleet.json is not what dashboards/build.py gives; run: make golden\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
