"""GPU on-call: whether the exporters see, what is broken, and who held the GPU when it broke."""

from typing import Any

from board import Rows, board, choice
from panels import RUNBOOK, Column, Panel, graph, grid, link, number, states
from promql import CLUSTER, DEVICE, NODES

GPUS = f'{NODES},uuid=~"$uuid"'
BOARD = f'{NODES},gpu_instance=""'
GPU = "cluster, node, gpu, uuid"
CRITICAL_XIDS = "46|48|62|64|74|79|95|109|110|119|120|136|140|143|151|155|156|158"
APPLICATION_XIDS = (
    "8|11|13|25|31|32|39|40|41|60|68|69|70|71|72|75|76|77|80|82|83|84|85|86|88|89|9[6-9]|10[0-5]|12[6-9]|13[0-5]|139"
)
QUIET_XIDS = "14|37|38|43|44|45|63|66|67|92|93|106|107|108|121|137|141|152|153|157|160|161"
"""The tiers of rules/src/health.yaml; all others are warnings."""
TIERS = {"critical": "red", "warning": "orange", "application": "blue", "none": "text"}
STATES = ("present", "expected", "advertised", "allocated")
INSTANCE = "cluster, instance, pod"
UP = f'up{{job=~"(.*/)?gpu-cost-exporter",{CLUSTER}}}'
ON_OFF = {"0": ("no", "transparent"), "1": ("yes", "orange")}
HELD = {"1": ("held", "green")}
REASONS = 'reason!~"gpu_idle|clocks_setting|display_clocks"'


def _of(name: str, by: str = INSTANCE) -> str:
    """An exporter's own series, by where it runs."""
    return f"max by ({by}) ({name}{{{CLUSTER}}})"


def _exporters() -> list[Panel]:
    oldest = "time() - min({})"
    return [
        number(
            "Exporters that answer",
            "Targets of the job gpu-cost-exporter that Prometheus can scrape, and all of them.",
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


def _alerts() -> list[Panel]:
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
                Column("cluster", "Cluster"),
                Column("node", "Node", links=(_node_link(),)),
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


def _node_link() -> dict[str, Any]:
    return link(
        "This node",
        "/d/gpu-cost-oncall/gpu-on-call?var-datasource=${datasource}&var-node=${__data.fields.Node:percentencode}&${__url_time_range}",
    )


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
                Column("cluster", "Cluster"),
                Column("node", "Node", links=(_node_link(),)),
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
                Column("cluster", "Cluster"),
                Column("node", "Node", links=(_node_link(),)),
                Column("gpu", "GPU"),
                Column("uuid", "UUID"),
                Column("model", "Model"),
                Column("Value #A", "Action"),
            ],
            sort="Action",
            span=24,
        ).height(6),
    ]


def _xids() -> list[Panel]:
    by = f"{GPU}, model, xid"
    seen = f"max by ({by}) (gpu_xid_last_seen_timestamp_seconds{{{NODES}}}) * 1000"
    tiers = (("critical", CRITICAL_XIDS), ("application", APPLICATION_XIDS), ("none", QUIET_XIDS))
    tiered = f'label_replace({seen}, "tier", "warning", "", "")'
    for tier, codes in tiers:
        tiered = f'label_replace({tiered}, "tier", "{tier}", "xid", "{codes}")'
    return [
        grid(
            "Xids",
            "Each code by GPU: its tier, when it was last seen, and how often since the exporter started. Tiers as in "
            "the runbook; none: nobody needs to hear of it.",
            [tiered, f"sum by ({by}) (max by ({by}, instance) (gpu_xid_errors_total{{{NODES}}}))"],
            [
                Column("tier", "Tier", texts=TIERS),
                Column("xid", "Xid", links=(link("Runbook", f"{RUNBOOK}#gpuxidcritical"),)),
                Column("cluster", "Cluster"),
                Column("node", "Node", links=(_node_link(),)),
                Column("gpu", "GPU"),
                Column("uuid", "UUID"),
                Column("model", "Model"),
                Column("Value #A", "Last seen", "dateTimeFromNow"),
                Column("Value #B", "Times"),
            ],
            sort="Last seen",
            none="No Xid since the exporters started",
            span=14,
        ),
        graph(
            "Xids over time",
            "Events by code in the last ten minutes of each point: their time is what counts, which sees the first "
            "one too.",
            (
                f"count by (xid) (max by ({by}) (gpu_xid_last_seen_timestamp_seconds{{{NODES}}}) > time() - 600)",
                "Xid {{xid}}",
            ),
            stacked=True,
            none="No Xid",
            span=10,
        ),
    ]


def _memory() -> list[Panel]:
    grew = "max by ({}) (last_over_time({}[10m]) - min_over_time({}[10m])) > 0"
    ecc = f"gpu_ecc_errors_total{{{NODES}}}"
    touched = " or ".join(
        f"sum by ({GPU}) ({name}{{{NODES}}}) > 0"
        for name in ("gpu_ecc_errors_total", "gpu_remapped_rows", "gpu_retired_pages")
    )
    pending = (
        f"max by ({GPU}) (gpu_row_remap_pending{{{NODES}}} or gpu_retired_pages_pending{{{NODES}}}) "
        f"and on ({GPU}) max by ({GPU}) (max_over_time(gpu_row_remap_pending{{{NODES}}}[$__range] @ end()) "
        f"or max_over_time(gpu_retired_pages_pending{{{NODES}}}[$__range] @ end())) > 0"
    )
    uncorrected = f'gpu_ecc_errors_total{{{NODES},type="uncorrected"}}'
    replaced = (
        f"sum by ({GPU}, model) (max by ({GPU}, model, type) (gpu_remapped_rows{{{NODES}}}) "
        f"or max by ({GPU}, model, cause) (gpu_retired_pages{{{NODES}}}))"
    )
    failed = (
        f"max by ({GPU}) (gpu_row_remap_failure{{{NODES}}}) "
        f"and on ({GPU}) max by ({GPU}) (max_over_time(gpu_row_remap_failure{{{NODES}}}[$__range] @ end())) > 0"
    )
    return [
        graph(
            "ECC errors",
            "Growth over ten minutes, by GPU and type. Uncorrected ones ended or spoilt what ran there.",
            (grew.format(f"{GPU}, type", ecc, ecc), "{{node}} GPU {{gpu}} {{type}}"),
            none="No ECC error",
        ),
        states(
            "Memory that waits to be replaced, or cannot be",
            "GPUs with a row remap (before Ampere: a page) that waits for a reset, or one that failed: the board is "
            "to be exchanged.",
            (pending, "{{node}} GPU {{gpu}} pending"),
            (f"2 * ({failed})", "{{node}} GPU {{gpu}} failed"),
            texts={"0": ("no", "transparent"), "1": ("pending", "orange"), "2": ("failed", "red")},
            span=12,
        ),
        grid(
            "Memory of boards",
            "GPUs with ECC errors since the driver was loaded, or replaced rows or pages over the board's life.",
            [
                f"max by ({GPU}, model) ({uncorrected}) and on ({GPU}) ({touched})",
                f'max by ({GPU}, model) (gpu_ecc_errors_total{{{NODES},type="corrected"}})',
                replaced,
            ],
            [
                Column("cluster", "Cluster"),
                Column("node", "Node", links=(_node_link(),)),
                Column("gpu", "GPU"),
                Column("uuid", "UUID"),
                Column("model", "Model"),
                Column("Value #A", "Uncorrected"),
                Column("Value #B", "Corrected"),
                Column("Value #C", "Rows or pages replaced"),
            ],
            sort="Uncorrected",
        ).height(8),
    ]


def _heat_and_links() -> list[Panel]:
    active = f"max by ({GPU}, reason) (gpu_throttle_active{{{NODES},{REASONS}}})"
    ever = f"max by ({GPU}, reason) (max_over_time(gpu_throttle_active{{{NODES},{REASONS}}}[$__range] @ end())) > 0"
    errors = "sum by ({}) (max by ({}) (last_over_time({}[10m]) - min_over_time({}[10m]))) > 0"
    links, replays = f"gpu_nvlink_errors_total{{{NODES}}}", f"gpu_pcie_replays_total{{{NODES}}}"
    return [
        states(
            "Why clocks are held down",
            "GPUs and reasons of the range, those for want of work or by a setting left out.",
            (f"{active} and on ({GPU}, reason) ({ever})", "{{node}} GPU {{gpu}} {{reason}}"),
            texts=ON_OFF,
        ),
        graph(
            "Least temperature margin by node",
            "Degrees that the hottest GPU of a node has left to its highest operating temperature; may be below 0.",
            (f"min by (cluster, node) (gpu_temperature_margin_celsius{{{NODES}}})", "{{cluster}} {{node}}"),
            unit="celsius",
            span=8,
        ),
        graph(
            "NVLink errors",
            "In ten minutes, by node and kind. A replay now and then is what replays are for; a recovery is not.",
            (errors.format("cluster, node, kind", f"{GPU}, kind", links, links), "{{node}} {{kind}}"),
            none="No NVLink error",
            span=8,
        ),
        graph(
            "PCIe replays",
            "Packets that had to be sent again in ten minutes, by node.",
            (errors.format("cluster, node", GPU, replays, replays), "{{cluster}} {{node}}"),
            none="No PCIe replay",
            span=8,
        ),
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
        ("Exporters: follows Cluster", _exporters()),
        ("Alerts: follows Cluster", _alerts()),
        ("GPUs that do not answer: follows Cluster, Node", _missing()),
        ("Xids: follows Cluster, Node", _xids()),
        ("Memory errors: follows Cluster, Node", _memory()),
        ("Heat, power and links: follows Cluster, Node", _heat_and_links()),
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
