"""Panels of on-call: what boards say of themselves, by Xids, memory errors, heat and links."""

from panels import GPU_COLUMNS, RUNBOOK, Column, Panel, graph, grid, link, states
from promql import GPU, NODES

TIERS = {"critical": "red", "warning": "orange", "application": "blue", "none": "text"}
ON_OFF = {"0": ("no", "transparent"), "1": ("yes", "orange")}
REASONS = 'reason!~"gpu_idle|clocks_setting|display_clocks"'


def xids() -> list[Panel]:
    """Driver errors by code."""
    by = f"{GPU}, model, xid"
    seen = f"max by ({by}, tier) (gpu_xid_last_seen_timestamp_seconds{{{NODES}}}) * 1000"
    return [
        grid(
            "Xids",
            "Each code by GPU: its tier, when it was last seen, and how often since the exporter started. Tiers as in "
            "the runbook; none: nobody needs to hear of it.",
            [seen, f"sum by ({by}) (max by ({by}, instance) (gpu_xid_errors_total{{{NODES}}}))"],
            [
                Column("tier", "Tier", texts=TIERS),
                Column("xid", "Xid", links=(link("Runbook", f"{RUNBOOK}#gpuxidcritical"),)),
                *GPU_COLUMNS,
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


def memory() -> list[Panel]:
    """ECC errors, and memory that was replaced or waits for it."""
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
                *GPU_COLUMNS,
                Column("Value #A", "Uncorrected"),
                Column("Value #B", "Corrected"),
                Column("Value #C", "Rows or pages replaced"),
            ],
            sort="Uncorrected",
        ).height(8),
    ]


def heat_and_links() -> list[Panel]:
    """Throttling, temperature, NVLink and PCIe."""
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
