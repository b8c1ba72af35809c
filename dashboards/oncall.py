"""GPU on-call dashboard: state of the exporters, hardware faults, and the pods that held a GPU when it failed."""

from typing import Any

from board import Rows, board, choice
from oncall_exporters import alerts, exporters
from oncall_health import heat_and_links, memory, xids
from panels import GPU_COLUMNS, NODE_COLUMNS, Column, Panel, graph, grid, states
from promql import CLUSTER, DEVICE, GPU, NODES

GPUS = f'{NODES},uuid=~"$uuid"'
STATES = ("present", "expected", "advertised", "allocated")
HELD = {"1": ("held", "green")}


def _missing() -> list[Panel]:
    by = "cluster, node"
    state = {name: f'max by ({by}) (gpu_devices{{{NODES},state="{name}"}})' for name in STATES}
    columns = [Column(f"Value #{letter}", name.capitalize()) for letter, name in zip("ABCD", STATES, strict=True)]
    return [
        grid(
            "Expected GPUs",
            "By node. Present: seen by the driver and not lost. Advertised: healthy in the device plugin. Present "
            "below Expected: GPUs are missing. Advertised below Present: some GPUs cannot be allocated.",
            [*state.values(), f"sum by ({by}) (max by ({GPU}) (gpu_up{{{NODES}}}) == bool 0)"],
            [
                *NODE_COLUMNS,
                *columns,
                Column("Value #E", "Down"),
            ],
            sort="Down",
            none="No node found",
            span=14,
        ),
        graph(
            "Missing GPUs",
            "Expected GPUs that the driver does not list, or reports as lost, by node.",
            (f"{state['expected']} - {state['present']} > 0", "{{cluster}} {{node}}"),
            none="No GPU is missing",
            span=10,
        ),
        grid(
            "Recovery actions",
            "GPUs for which the driver requests an action: 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset, "
            "5 recover the IMEX domain, 6 bus reset, 7 system reboot.",
            [f"max by ({GPU}, model) (gpu_recovery_action{{{NODES}}}) > 0"],
            [
                *GPU_COLUMNS,
                Column("Value #A", "Action"),
            ],
            sort="Action",
            span=24,
        ).height(6),
    ]


def _attribution() -> list[Panel]:
    return [
        graph(
            "Devices with unknown holder",
            "Whole GPUs and MIG instances whose holder is unknown because the kubelet did not answer, by node.",
            (
                f'sum by (cluster, node) (max by ({DEVICE}) (gpu_allocation_state{{{NODES},state="unknown"}})) > 0',
                "{{cluster}} {{node}}",
            ),
            none="All holders are known",
            span=8,
        ),
        graph(
            "Unresolved devices",
            "Devices that the kubelet lists with a pod but that are not found on the node, by reason.",
            (
                f"sum by (cluster, node, reason) (gpu_pod_unresolved_devices{{{NODES}}}) > 0",
                "{{cluster}} {{node}} {{reason}}",
            ),
            none="All devices are resolved",
            span=8,
        ),
        graph(
            "Processes outside pods",
            "GPU processes that belong to no pod that the kubelet lists.",
            (
                f"sum by (cluster, node) (max by ({DEVICE}) (gpu_unattributed_processes{{{NODES}}})) > 0",
                "{{cluster}} {{node}}",
            ),
            none="No such process",
            span=8,
        ),
    ]


def _drill_down() -> list[Panel]:
    held = f"{DEVICE}, pod_namespace, pod_name"
    name = "GPU {{gpu}} {{gpu_instance}}"
    return [
        states(
            "Holders",
            "One strip for each pod on each GPU or MIG instance; select a node or a UUID above.",
            (f"max by ({held}) (gpu_pod_info{{{GPUS}}})", "{{node}} " + name + " {{pod_namespace}}/{{pod_name}}"),
            texts=HELD,
            none="No pod held a device",
        ),
        graph(
            "Activity",
            "Activity of each GPU or MIG instance. A gap is unknown, not 0.",
            (f"max by ({DEVICE}) (gpu_activity_ratio{{{GPUS}}})", "{{node}} " + name),
            unit="percentunit",
            span=8,
        ),
        graph(
            "Memory used",
            "Memory used on each GPU or MIG instance.",
            (f"max by ({DEVICE}) (gpu_memory_used_bytes{{{GPUS}}})", "{{node}} " + name),
            unit="bytes",
            span=8,
        ),
        graph(
            "Temperature",
            "Temperature of physical GPUs by sensor.",
            (f"max by ({GPU}, sensor) (gpu_temperature_celsius{{{GPUS}}})", "{{node}} GPU {{gpu}} {{sensor}}"),
            unit="celsius",
            span=8,
        ),
    ]


def build() -> dict[str, Any]:
    """Return the dashboard as JSON values."""
    rows: Rows = (
        ("Exporters (filter: Cluster)", exporters()),
        ("Alerts (filter: Cluster)", alerts()),
        ("Failed GPUs (filters: Cluster, Node)", _missing()),
        ("Xids (filters: Cluster, Node)", xids()),
        ("Memory errors (filters: Cluster, Node)", memory()),
        ("Temperature, power and links (filters: Cluster, Node)", heat_and_links()),
        ("Attribution faults (filters: Cluster, Node)", _attribution()),
        ("One node or GPU (filters: Cluster, Node, UUID)", _drill_down()),
    )
    return board(
        uid="gpu-cost-oncall",
        title="GPU on-call",
        description="State of the exporters, hardware faults, and the pods that held a GPU when it failed.",
        time_from="now-3h",
        refresh="30s",
        timezone="browser",
        variables=(
            choice("cluster", "Cluster", "label_values(gpu_info, cluster)"),
            choice("node", "Node", f"label_values(gpu_info{{{CLUSTER}}}, node)"),
            choice("uuid", "UUID", f"label_values(gpu_info{{{NODES}}}, uuid)"),
        ),
        rows=rows,
    )
