"""On-call panels: Xids, memory errors, temperature, throttling and links."""

from panels import GPU_COLUMNS, RUNBOOK, Column, Panel, graph, grid, link, states
from promql import GPU, NODES

TIERS = {"critical": "red", "warning": "orange", "application": "blue", "none": "text"}
ON_OFF = {"0": ("no", "transparent"), "1": ("yes", "orange")}
REASONS = 'reason!~"gpu_idle|clocks_setting|display_clocks"'


def xids() -> list[Panel]:
    """Return the panels on driver errors (Xids)."""
    by = f"{GPU}, model, xid"
    seen = f"max by ({by}, tier) (gpu_xid_last_seen_timestamp_seconds{{{NODES}}}) * 1000"
    return [
        grid(
            "Xids",
            "Xids by GPU and code: tier, time of the last event, and number of events since the exporter started. The "
            "runbook describes the tiers; codes of tier none raise no alert.",
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
            "GPUs with an event in the last ten minutes, by code, from the time of the event; so the first event "
            "counts.",
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
    """Return the panels on ECC errors and on replaced memory."""
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
            "Increase over ten minutes, by GPU and type. An uncorrected error ends or corrupts the work on the GPU.",
            (grew.format(f"{GPU}, type", ecc, ecc), "{{node}} GPU {{gpu}} {{type}}"),
            none="No ECC error",
        ),
        states(
            "Row remapping pending or failed",
            "Pending: a row remap (before Ampere: a page retirement) waits for a GPU reset. Failed: replace the GPU.",
            (pending, "{{node}} GPU {{gpu}} pending"),
            (f"2 * ({failed})", "{{node}} GPU {{gpu}} failed"),
            texts={"0": ("no", "transparent"), "1": ("pending", "orange"), "2": ("failed", "red")},
            span=12,
        ),
        grid(
            "Memory errors by GPU",
            "GPUs with ECC errors since the driver was loaded, or with rows or pages replaced in their lifetime.",
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
    """Return the panels on throttling, temperature, NVLink and PCIe."""
    active = f"max by ({GPU}, reason) (gpu_throttle_active{{{NODES},{REASONS}}})"
    ever = f"max by ({GPU}, reason) (max_over_time(gpu_throttle_active{{{NODES},{REASONS}}}[$__range] @ end())) > 0"
    errors = "sum by ({}) (max by ({}) (last_over_time({}[10m]) - min_over_time({}[10m]))) > 0"
    links, replays = f"gpu_nvlink_errors_total{{{NODES}}}", f"gpu_pcie_replays_total{{{NODES}}}"
    return [
        states(
            "Throttling reasons",
            "GPUs and reasons in the range, without idleness and clock settings.",
            (f"{active} and on ({GPU}, reason) ({ever})", "{{node}} GPU {{gpu}} {{reason}}"),
            texts=ON_OFF,
        ),
        graph(
            "Lowest temperature margin by node",
            "Degrees between the hottest GPU of a node and its highest operating temperature; can be negative.",
            (f"min by (cluster, node) (gpu_temperature_margin_celsius{{{NODES}}})", "{{cluster}} {{node}}"),
            unit="celsius",
            span=8,
        ),
        graph(
            "NVLink errors",
            "Errors in ten minutes, by node and kind. Occasional replays are normal; recoveries are not.",
            (errors.format("cluster, node, kind", f"{GPU}, kind", links, links), "{{node}} {{kind}}"),
            none="No NVLink error",
            span=8,
        ),
        graph(
            "PCIe replays",
            "Packets sent again in ten minutes, by node.",
            (errors.format("cluster, node", GPU, replays, replays), "{{cluster}} {{node}}"),
            none="No PCIe replay",
            span=8,
        ),
    ]
