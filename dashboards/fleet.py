"""GPU fleet dashboard: capacity, allocation, activity, free GPUs, and idle workloads."""

from typing import Any

from board import Rows, board, choice, text
from panels import RUNBOOK, Column, Panel, bars, graph, grid, heat, link, number
from promql import CLUSTER, DEVICE, HOLDER, NODES, STEPS, WORKLOAD, of_top

MODELS = f'{CLUSTER},model=~"$model"'
PODS = f'{NODES},pod_namespace=~"$namespace"'
WORKLOADS = f'{CLUSTER},workload_namespace=~"$namespace",team=~"$team"'
POOL = "model, instance_type, capacity_type"
POOL_NAME = "{{model}} {{instance_type}} {{capacity_type}}"
ACTIVITY_OF_BOARDS = f'gpu_activity_ratio{{{NODES},gpu_instance=""}}'
FUNNEL = ("Capacity", "Allocated", "Working", "Active", "Profiled", "Effective")
FREE = (
    f'sum by (cluster, node) (max by ({DEVICE}) (gpu_allocation_state{{{NODES},gpu_instance="",state="unallocated"}}) '
    f"and on ({DEVICE}) max by ({DEVICE}) (gpu_up{{{NODES}}}) == 1)"
)
"""Unallocated whole GPUs by node; partitioned GPUs are left out."""
ACTIVITY = f"max by ({HOLDER}) (gpu_pod_activity_ratio{{{PODS}}})"
SHARE = f"max by ({HOLDER}) (gpu_pod_share_ratio{{{PODS}}})"
TO_PODS = (
    "/d/gpu-cost-fleet/gpu-fleet?var-datasource=${datasource}&var-namespace=${__data.fields.Namespace:percentencode}"
    "&${__url_time_range}"
)
TO_OWNER = (
    "${cost_page}/owner?namespace=${__data.fields.Namespace:percentencode}"
    "&workload=${__data.fields.Workload:percentencode}&kind=${__data.fields.Kind:percentencode}"
)


def _used(weight: str, by: str) -> str:
    """Return the mean of measured activity, weighted by share."""
    return f"sum by ({by}) ({ACTIVITY} * {weight}) / sum by ({by}) ({weight} and {ACTIVITY})"


def _part(step: str) -> str:
    """Return the part of a workload's GPUs that remains after a step of the funnel, over the last 15 minutes."""
    recent = f'{{window="15m",{CLUSTER}}}'
    measured = f"(workload:gpu_measured_seconds:sum{recent} > 0)"
    ratio = f"workload:gpu_{step.lower()}_seconds:sum{recent} / {measured} * workload:gpu_coverage:ratio{recent}"
    return f"clamp_max({ratio}, 1)"


def _funnel() -> list[Panel]:
    physical = f"max by (cluster, node, uuid) (gpu_up{{{CLUSTER}}})"
    held, of_held = f"workload:gpu_cost_per_hour:sum{{{CLUSTER}}}", "* ignoring (currency, window) group_left ()"
    costs = {
        "Capacity": f"sum by (currency) (max by (cluster, node, gpu, currency) (gpu_hourly_price{{{CLUSTER}}}))",
        "Allocated": f"sum by (currency) ({held})",
        **{name: f"sum by (currency) ({held} {of_held} {_part(name)})" for name in STEPS},
    }
    return [
        bars(
            "GPUs: capacity to effective use",
            "Capacity: physical GPUs, failed ones included. Allocated: held by pods, by share. Working: allocated and "
            "active for at least 5 % of the last 15 minutes. Active: GPUs that would suffice if they never waited. "
            "Profiled: the part of Active with all resources measured; the rest is not waste. Effective: GPUs that "
            "would suffice for the profiled part at the limit of their hardware.",
            *((f"sum(cluster:gpu_{name.lower()}:sum{{{CLUSTER}}})", name) for name in FUNNEL),
        ),
        bars(
            "Cost per hour: capacity to effective use",
            "At current prices, by currency, without GPUs that have no price. Active, Profiled, Effective: cost of "
            "each workload times that part of its GPUs in the last 15 minutes. Active time that was not profiled "
            "may be effective.",
            *((expression, name + " {{currency}}") for name, expression in costs.items()),
            unit="locale",
        ),
        number(
            "GPUs down",
            "GPUs that are lost, missing, or need a reset.",
            (f"count({physical} == 0) or vector(0)", ""),
            bad_from=1,
        ),
        number(
            "Devices unknown",
            "Whole GPUs and MIG instances whose holder is unknown because the kubelet did not answer.",
            (f'sum(max by ({DEVICE}) (gpu_allocation_state{{{CLUSTER},state="unknown"}}))', ""),
            bad_from=1,
        ),
        number(
            "GPUs idle",
            "GPUs, by share, of workloads that meet the condition of GPUUnderutilised.",
            (f"sum(workload:gpu_underused:sum{{{CLUSTER}}}) or vector(0)", ""),
            bad_from=1,
            decimals=1,
        ),
        number(
            "Idle cost per hour",
            "Cost of the idle time of allocated GPUs in the last 15 minutes, at current prices.",
            (f"sum by (currency) (workload:gpu_idle_cost_per_hour:rate15m{{{CLUSTER}}})", "{{currency}}"),
            unit="locale",
            decimals=2,
        ),
    ]


def _over_time() -> list[Panel]:
    return [
        graph(
            "Capacity, allocated, working, active, effective",
            "GPUs by share, as in the funnel above. The gap between two lines is the loss at that step, except between "
            "Active and Profiled: that part was not profiled.",
            *((f"sum(cluster:gpu_{name.lower()}:sum{{{CLUSTER}}})", name) for name in FUNNEL),
            span=24,
        )
    ]


def _free() -> list[Panel]:
    return [
        grid(
            "Pools",
            "Capacity, unallocated GPUs and their cost per hour at current prices, by model, instance type and "
            "capacity type. A pool with prices in two currencies has one row for each.",
            [
                f"sum by ({POOL}) (pool:gpu_capacity:sum{{{MODELS}}})",
                f"sum by ({POOL}) (pool:gpu_unallocated:sum{{{MODELS}}})",
                f"sum by ({POOL}, currency) (pool:gpu_unallocated_cost_per_hour:sum{{{MODELS}}})",
            ],
            [
                Column("model", "Model"),
                Column("instance_type", "Instance type"),
                Column("capacity_type", "Capacity type"),
                Column("Value #A", "GPUs"),
                Column("Value #B", "Unallocated"),
                Column("Value #C", "Per hour", "locale"),
                Column("currency", "Currency"),
            ],
            sort="Unallocated",
            span=12,
        ).height(8),
        graph(
            "Unallocated by model and pool",
            "Unallocated GPUs by share: a free MIG instance or replica counts as its part of a GPU.",
            (f"sum by ({POOL}) (pool:gpu_unallocated:sum{{{MODELS}}})", POOL_NAME),
            stacked=True,
        ),
        number(
            "Free whole GPUs",
            "Unallocated, healthy GPUs without MIG partitions on the selected nodes.",
            (f"sum({FREE}) or vector(0)", ""),
        ),
        number(
            "Jobs that fit",
            "Jobs of so many GPUs on one node (variable: GPUs of a job) that the free GPUs could take.",
            (f"sum(floor({FREE} / $job_gpus)) or vector(0)", ""),
        ),
        number(
            "Free GPUs lost to fragmentation",
            "Free GPUs on nodes with too few free GPUs for another such job.",
            (f"sum({FREE} % $job_gpus) or vector(0)", ""),
        ),
        bars(
            "Nodes by free whole GPUs",
            "Number of nodes by number of free GPUs. Nodes with some but not all GPUs free are fragmented.",
            (f'count_values("free", {FREE})', "{{free}} free"),
            span=12,
            height=6,
        ),
    ]


def _layout() -> list[Panel]:
    instance = f'gpu_info{{{NODES},gpu_instance!=""}}'
    held = f'gpu_allocation_state{{{NODES},gpu_instance!="",state="allocated"}}'
    by = "cluster, node, gpu, mig_profile"
    return [
        grid(
            "MIG layout",
            "Instances of each partitioned GPU by profile, and how many of them pods hold.",
            [
                f"count by ({by}) (max by ({DEVICE}, mig_profile) ({instance}))",
                f"sum by ({by}) (max by ({DEVICE}, mig_profile) ({held}))",
            ],
            [
                Column("cluster", "Cluster"),
                Column("node", "Node"),
                Column("gpu", "GPU"),
                Column("mig_profile", "Profile"),
                Column("Value #A", "Instances"),
                Column("Value #B", "Held"),
            ],
            sort="Node",
            ascending=True,
            none="No GPU is partitioned",
            span=12,
        ).height(8),
        bars(
            "Models",
            "Physical GPUs by model.",
            (f"sum by (model) (pool:gpu_capacity:sum{{{MODELS}}})", "{{model}}"),
            span=12,
        ),
    ]


def _nodes() -> list[Panel]:
    return [
        heat(
            "Activity by node",
            "Mean activity of a node's physical GPUs. A gap is unknown, not 0: MIG before Hopper needs DCGM to be "
            "measured.",
            (
                f"avg by (cluster, node) (max by ({DEVICE}) (avg_over_time({ACTIVITY_OF_BOARDS}[$__rate_interval])))",
                "{{cluster}} {{node}}",
            ),
        ),
        graph(
            "GPU memory",
            "Used and total memory of physical GPUs.",
            *(
                (f'sum(max by ({DEVICE}) (gpu_memory_{name}_bytes{{{NODES},gpu_instance=""}}))', name)
                for name in ("used", "total")
            ),
            unit="bytes",
        ),
        graph(
            "Power by node",
            "Power draw of the GPUs, without the host.",
            (f"sum by (cluster, node) (max by ({DEVICE}) (gpu_power_watts{{{NODES}}}))", "{{cluster}} {{node}}"),
            unit="watt",
            stacked=True,
        ),
    ]


def _idle_workloads() -> Panel:
    idle = f"workload:gpu_idle_cost_per_hour:rate15m{{{WORKLOADS}}}"
    top = f"topk by (currency) (20, sum by ({WORKLOAD}, currency) ({idle}) > 0)"
    columns = (
        f"sum by ({WORKLOAD}) (workload:gpu_held:sum{{{WORKLOADS}}})",
        *(
            f"max by ({WORKLOAD}) (workload:gpu_{name}{{{window}{WORKLOADS}}})"
            for name, window in (
                ("active:ratio", 'window="1h",'),
                ("effective:ratio", 'window="1h",'),
                ("idle_for_seconds:min", ""),
                ("age_seconds:max", ""),
            )
        ),
    )
    return grid(
        "Top idle workloads",
        "The 20 workloads of each currency with the highest idle cost in the last 15 minutes, at current prices. "
        "Idle for: time since any of its devices was active. Effective: effective part of profiled active time. "
        "Unknown activity is not idle. Workloads without a price are listed under Idle pods only.",
        [
            top,
            *(of_top(column, top) for column in columns),
        ],
        [
            Column(
                "workload_name",
                "Workload",
                links=(link("Cost page", TO_OWNER), link("Runbook", f"{RUNBOOK}#gpuunderutilised")),
            ),
            Column("workload_kind", "Kind"),
            Column("workload_namespace", "Namespace", links=(link("Pods of the namespace", TO_PODS),)),
            Column("team", "Team"),
            Column("Value #A", "Idle per hour", "locale"),
            Column("currency", "Currency"),
            Column("Value #B", "GPUs"),
            Column("Value #C", "Activity 1 h", "percentunit", gauge=True),
            Column("Value #D", "Effective 1 h", "percentunit", gauge=True),
            Column("Value #E", "Idle for", "s"),
            Column("Value #F", "Age", "s"),
        ],
        sort="Idle per hour",
        none="No workload is idle",
    )


def _idle_pods() -> Panel:
    by_pod = "cluster, node, pod_namespace, pod_name"
    return grid(
        "Idle pods",
        "Pods with all devices below the idle threshold, longest first; GPUs by share. Unknown activity is not idle.",
        [
            f"min by ({by_pod}) (gpu_pod_idle_for_seconds{{{PODS}}}) > 60",
            f"sum by ({by_pod}) ({SHARE})",
            f"min by ({by_pod}) (gpu_pod_age_seconds{{{PODS}}})",
        ],
        [
            Column("pod_namespace", "Namespace"),
            Column("pod_name", "Pod"),
            Column("node", "Node"),
            Column("Value #A", "Idle for", "s"),
            Column("Value #B", "GPUs"),
            Column("Value #C", "Held for", "s"),
        ],
        sort="Idle for",
        none="No pod is idle",
    )


def _pods() -> list[Panel]:
    return [
        _idle_workloads(),
        _idle_pods(),
        graph(
            "Activity by namespace",
            "Mean activity of the GPUs that pods of the namespace hold, by share. A gap is unknown, not 0.",
            (_used(SHARE, "pod_namespace"), "{{pod_namespace}}"),
            unit="percentunit",
        ),
        graph(
            "Activity by pod",
            "Activity of each holder on its device, averaged over the devices of the pod by share.",
            (_used(SHARE, "cluster, pod_namespace, pod_name"), "{{cluster}} {{pod_namespace}}/{{pod_name}}"),
            unit="percentunit",
        ),
        graph(
            "GPUs held by namespace",
            "By share: a MIG instance or a replica counts as its part of a GPU.",
            (f"sum by (pod_namespace) ({SHARE})", "{{pod_namespace}}"),
            stacked=True,
        ),
        graph(
            "Memory by pod",
            "Device memory used by the pod's processes.",
            (
                f"sum by (cluster, pod_namespace, pod_name) (max by ({HOLDER}) (gpu_pod_memory_used_bytes{{{PODS}}}))",
                "{{cluster}} {{pod_namespace}}/{{pod_name}}",
            ),
            unit="bytes",
            stacked=True,
        ),
    ]


def build() -> dict[str, Any]:
    """Return the dashboard as JSON values."""
    rows: Rows = (
        ("Fleet (filter: Cluster)", _funnel()),
        ("Over time (filter: Cluster)", _over_time()),
        ("Free GPUs (filters: Cluster, Model; whole GPUs: Node)", _free()),
        ("Layout (filters: Cluster; MIG: Node; models: Model)", _layout()),
        ("Nodes (filters: Cluster, Node)", _nodes()),
        ("Owners (filters: Cluster, Namespace; workloads: Team; pods: Node)", _pods()),
    )
    return board(
        uid="gpu-cost-fleet",
        title="GPU fleet",
        description="Capacity, allocation, activity, free GPUs, and idle workloads.",
        time_from="now-3h",
        refresh="30s",
        timezone="browser",
        variables=(
            choice("cluster", "Cluster", "label_values(gpu_info, cluster)"),
            choice("node", "Node", f"label_values(gpu_info{{{CLUSTER}}}, node)"),
            choice("namespace", "Namespace", f"label_values(gpu_pod_info{{{CLUSTER}}}, pod_namespace)"),
            choice("team", "Team", f"label_values(gpu_pod_info{{{CLUSTER}}}, team)"),
            choice("model", "Model", f"label_values(gpu_info{{{CLUSTER}}}, model)"),
            text("job_gpus", "GPUs per job", "8"),
        ),
        rows=rows,
    )
