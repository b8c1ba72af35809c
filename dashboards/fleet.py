"""GPU fleet: how many GPUs there are, who holds them, whether they work, where free ones are, who leaves them idle."""

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
"""Whole GPUs that nobody holds, by node; a partitioned GPU is none."""
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
    """Mean activity by share, of what was measured."""
    return f"sum by ({by}) ({ACTIVITY} * {weight}) / sum by ({by}) ({weight} and {ACTIVITY})"


def _part(step: str) -> str:
    """The part of a workload's GPUs that a step of the funnel leaves, over the last 15 minutes."""
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
            "GPUs: from what is there to what is used",
            "Capacity: physical GPUs, those that are down too. Allocated: held by pods, by share. Working: held and at "
            "work for 5 % of the last 15 minutes or more. Active: so many GPUs would do it if they never waited. "
            "Profiled: the part of Active in which every resource was measured; the rest is not lost. Effective: so "
            "many would do the profiled part at the limit of their hardware.",
            *((f"sum(cluster:gpu_{name.lower()}:sum{{{CLUSTER}}})", name) for name in FUNNEL),
        ),
        bars(
            "The same in money per hour",
            "At prices of now, by currency. GPUs without a price are not in it. Active, Profiled and Effective: these "
            "parts of a workload's GPUs in the last 15 minutes, of its money. Active and not profiled is not lost: it "
            "may be effective.",
            *((expression, name + " {{currency}}") for name, expression in costs.items()),
            unit="locale",
        ),
        number(
            "GPUs down",
            "Lost, missing, or in need of a reset.",
            (f"count({physical} == 0) or vector(0)", ""),
            bad_from=1,
        ),
        number(
            "Devices unknown",
            "Whole GPUs and MIG instances of which the kubelet could not be asked who holds them.",
            (f'sum(max by ({DEVICE}) (gpu_allocation_state{{{CLUSTER},state="unknown"}}))', ""),
            bad_from=1,
        ),
        number(
            "GPUs idle",
            "Held by workloads that the rule of GPUUnderutilised finds idle; by share.",
            (f"sum(workload:gpu_underused:sum{{{CLUSTER}}}) or vector(0)", ""),
            bad_from=1,
            decimals=1,
        ),
        number(
            "Idle money per hour",
            "Of what is held: how idle it was in the last 15 minutes, at prices of now.",
            (f"sum by (currency) (workload:gpu_idle_cost_per_hour:rate15m{{{CLUSTER}}})", "{{currency}}"),
            unit="locale",
            decimals=2,
        ),
    ]


def _over_time() -> list[Panel]:
    return [
        graph(
            "Capacity, allocated, working, active, effective",
            "GPUs by share, as in the funnel above. The gap between two lines is what is lost at that step. Between "
            "Active and Profiled nothing is lost: that part was not profiled.",
            *((f"sum(cluster:gpu_{name.lower()}:sum{{{CLUSTER}}})", name) for name in FUNNEL),
            span=24,
        )
    ]


def _free() -> list[Panel]:
    return [
        grid(
            "Pools",
            "GPUs by model, instance type and capacity type: how many there are, how many nobody holds, and what "
            "those cost an hour at prices of now. A pool that is paid in two currencies has a row for each.",
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
            "GPUs that nobody holds, by share: free MIG instances and replicas are parts of one.",
            (f"sum by ({POOL}) (pool:gpu_unallocated:sum{{{MODELS}}})", POOL_NAME),
            stacked=True,
        ),
        number(
            "Free whole GPUs",
            "That nobody holds, that work and are not partitioned, on the nodes chosen.",
            (f"sum({FREE}) or vector(0)", ""),
        ),
        number(
            "Jobs that fit",
            "Jobs of so many GPUs on one node (variable: GPUs of a job) that the free GPUs could take.",
            (f"sum(floor({FREE} / $job_gpus)) or vector(0)", ""),
        ),
        number(
            "Free GPUs that no such job can use",
            "They are on nodes where too few are free: fragmentation.",
            (f"sum({FREE} % $job_gpus) or vector(0)", ""),
        ),
        bars(
            "Nodes by free whole GPUs",
            "How many nodes have so many GPUs free. What lies between none and all is fragmentation.",
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
            "Instances of each partitioned GPU by profile, and how many of them a pod holds.",
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
            "Mean activity of a node's physical GPUs. A gap is unknown, not 0: MIG before Hopper cannot be measured "
            "without DCGM.",
            (
                f"avg by (cluster, node) (max by ({DEVICE}) (avg_over_time({ACTIVITY_OF_BOARDS}[$__rate_interval])))",
                "{{cluster}} {{node}}",
            ),
        ),
        graph(
            "Memory of the GPUs",
            "Used and total, of whole boards.",
            *(
                (f'sum(max by ({DEVICE}) (gpu_memory_{name}_bytes{{{NODES},gpu_instance=""}}))', name)
                for name in ("used", "total")
            ),
            unit="bytes",
        ),
        graph(
            "Power by node",
            "Drawn by the boards; no host power.",
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
        "The twenty of each currency that lose most money to idle GPUs, by the last 15 minutes and prices of now. "
        "Idle for: since the device that worked last did. Effective: the effective part of profiled active time. "
        "Unknown activity is not idle. A workload without a price is not here: see idle pods.",
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
        "Pods whose devices have all been below the idle threshold, longest first; GPUs by share. Unknown activity is "
        "not idle.",
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
            "Mean activity of the GPUs that a namespace's pods hold, by share. A gap is unknown, not 0.",
            (_used(SHARE, "pod_namespace"), "{{pod_namespace}}"),
            unit="percentunit",
        ),
        graph(
            "Activity by pod",
            "Each holder's part of its device's activity, averaged over the pod's devices by share.",
            (_used(SHARE, "cluster, pod_namespace, pod_name"), "{{cluster}} {{pod_namespace}}/{{pod_name}}"),
            unit="percentunit",
        ),
        graph(
            "GPUs held by namespace",
            "By share: a MIG instance or a replica is a part of a GPU.",
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
    """The dashboard as JSON values."""
    rows: Rows = (
        ("The fleet: follows Cluster", _funnel()),
        ("Over time: follows Cluster", _over_time()),
        ("What is free: follows Cluster, Model; whole GPUs follow Node", _free()),
        ("Layout: MIG follows Cluster, Node; models follow Cluster, Model", _layout()),
        ("Nodes: follows Cluster, Node", _nodes()),
        ("Who: follows Cluster, Namespace; workloads follow Team, pods follow Node", _pods()),
    )
    return board(
        uid="gpu-cost-fleet",
        title="GPU fleet",
        description="How many GPUs there are, who holds them, whether they work, where free ones are, who idles.",
        time_from="now-3h",
        refresh="30s",
        timezone="browser",
        variables=(
            choice("cluster", "Cluster", "label_values(gpu_info, cluster)"),
            choice("node", "Node", f"label_values(gpu_info{{{CLUSTER}}}, node)"),
            choice("namespace", "Namespace", f"label_values(gpu_pod_info{{{CLUSTER}}}, pod_namespace)"),
            choice("team", "Team", f"label_values(gpu_pod_info{{{CLUSTER}}}, team)"),
            choice("model", "Model", f"label_values(gpu_info{{{CLUSTER}}}, model)"),
            text("job_gpus", "GPUs of a job", "8"),
        ),
        rows=rows,
    )
