"""GPU on-call: whether the exporters see, what is broken, and who held the GPU when it broke."""

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
            "GPUs that should be there",
            "By node: seen by the driver and not lost, expected, healthy for the kubelet, held. Less than expected "
            "are missing; less advertised than present cannot be held.",
            [*state.values(), f"sum by ({by}) (max by ({GPU}) (gpu_up{{{NODES}}}) == bool 0)"],
            [
                *NODE_COLUMNS,
                *columns,
                Column("Value #E", "Down"),
            ],
            sort="Down",
            none="No node is seen",
            span=14,
        ),
        graph(
            "Expected and not present",
            "GPUs by node that are expected and that the driver does not show, or shows as lost.",
            (f"{state['expected']} - {state['present']} > 0", "{{cluster}} {{node}}"),
            none="None is missing",
            span=10,
        ),
        grid(
            "What the driver asks for",
            "GPUs with a recovery action: 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset, 5 recover the "
            "IMEX domain, 6 bus reset, 7 system reboot.",
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
            "Devices of unknown holder",
            "Whole GPUs and MIG instances by node of which the kubelet could not be asked who holds them.",
            (
                f'sum by (cluster, node) (max by ({DEVICE}) (gpu_allocation_state{{{NODES},state="unknown"}})) > 0',
                "{{cluster}} {{node}}",
            ),
            none="All holders are known",
            span=8,
        ),
        graph(
            "Devices that match nothing",
            "Listed by the kubelet with a pod, and not found on the node, by reason.",
            (
                f"sum by (cluster, node, reason) (gpu_pod_unresolved_devices{{{NODES}}}) > 0",
                "{{cluster}} {{node}} {{reason}}",
            ),
            none="All devices are found",
            span=8,
        ),
        graph(
            "Processes of no pod",
            "On devices, and in no pod that the kubelet lists.",
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
            "Who held it",
            "A strip for each pod on each GPU or MIG instance: choose a node or a UUID above.",
            (f"max by ({held}) (gpu_pod_info{{{GPUS}}})", "{{node}} " + name + " {{pod_namespace}}/{{pod_name}}"),
            texts=HELD,
            none="No pod held it",
        ),
        graph(
            "Activity",
            "Of each GPU or MIG instance. A gap is unknown, not 0.",
            (f"max by ({DEVICE}) (gpu_activity_ratio{{{GPUS}}})", "{{node}} " + name),
            unit="percentunit",
            span=8,
        ),
        graph(
            "Memory used",
            "Of each GPU or MIG instance.",
            (f"max by ({DEVICE}) (gpu_memory_used_bytes{{{GPUS}}})", "{{node}} " + name),
            unit="bytes",
            span=8,
        ),
        graph(
            "Temperature",
            "By sensor, of whole boards.",
            (f"max by ({GPU}, sensor) (gpu_temperature_celsius{{{GPUS}}})", "{{node}} GPU {{gpu}} {{sensor}}"),
            unit="celsius",
            span=8,
        ),
    ]


def build() -> dict[str, Any]:
    """The dashboard as JSON values."""
    rows: Rows = (
        ("Exporters: follows Cluster", exporters()),
        ("Alerts: follows Cluster", alerts()),
        ("GPUs that do not answer: follows Cluster, Node", _missing()),
        ("Xids: follows Cluster, Node", xids()),
        ("Memory errors: follows Cluster, Node", memory()),
        ("Heat, power and links: follows Cluster, Node", heat_and_links()),
        ("Who holds what cannot be told: follows Cluster, Node", _attribution()),
        ("One node, one GPU: follows Cluster, Node, UUID", _drill_down()),
    )
    return board(
        uid="gpu-cost-oncall",
        title="GPU on-call",
        description="Whether the exporters see, what is broken, and who held the GPU when it broke.",
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
