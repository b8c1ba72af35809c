"""The agent's page: server-rendered, live by a small script, whole without it; loads nothing from anywhere else."""

import base64
import hashlib
from importlib.resources import files

from exporter import __version__
from exporter.exposition import page_sources
from exporter.exposition.device_collector import present
from exporter.exposition.page_money import prices
from exporter.exposition.page_owners import owners
from exporter.exposition.page_summary import glance, tiles
from exporter.exposition.page_table import table
from exporter.exposition.page_text import chip, duration, moment, text, words
from exporter.exposition.page_waste import waste
from exporter.model import Snapshot

_STATIC = files("exporter.exposition") / "static"
_CSS = (_STATIC / "page.css").read_text(encoding="utf-8")
_SCRIPT = (_STATIC / "page.js").read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash(_CSS)}",
        f"script-src {_hash(_SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Only what the page itself carries may run; a pod's name that smuggles in markup would still do nothing."""


def document(snapshot: Snapshot | None) -> str:
    """The whole page."""
    node = text(snapshot.node) if snapshot else "a node that starts"
    prefix = "SIMULATED " if snapshot and snapshot.simulated else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="robots" content="noindex">'
        f'<title>{prefix}GPUs of {node}</title><link rel="icon" href="data:,"><style>{_CSS}</style>'
        '<noscript><meta http-equiv="refresh" content="5"></noscript></head><body><div class="wrap">'
        f'<div id="live">{fragment(snapshot)}</div>'
        '<div id="status" class="statusbar" hidden><p id="age"></p>'
        '<p id="state" role="status" aria-live="polite"></p></div>'
        f"</div><script>{_SCRIPT}</script></body></html>"
    )


def fragment(snapshot: Snapshot | None) -> str:
    """What changes: everything but the frame. The script puts a new one in place of the old one."""
    if snapshot is None:
        return '<main><header class="top"><h1>Starting</h1></header><p>There is no picture of this node yet.</p></main>'
    simulated = (
        '<p class="simulated" role="note">SIMULATED NODE — nothing here is real</p>' if snapshot.simulated else ""
    )
    upper = (
        f"{_top(snapshot)}{_hint(snapshot)}{_problems(snapshot)}{tiles(snapshot)}{waste(snapshot)}{glance(snapshot)}"
    )
    lower = f"{table(snapshot)}{owners(snapshot)}{_unresolved(snapshot)}{prices(snapshot)}{_foot(snapshot)}"
    return f'<main data-taken="{snapshot.taken_at_seconds:.3f}">{simulated}{upper}{lower}</main>'


def _top(snapshot: Snapshot) -> str:
    facts = []
    models = list(dict.fromkeys(view.gpu.model for view in snapshot.devices if not view.instance))
    if models:
        facts.append(" and ".join(text(name) for name in models))
    if snapshot.driver_version:
        facts.append(f"driver {text(snapshot.driver_version)}")
    if snapshot.nvml_version:
        facts.append(f"NVML {text(snapshot.nvml_version)}")
    if snapshot.dcgm_version:
        facts.append(f"DCGM {text(snapshot.dcgm_version)}")
    node = snapshot.node_facts
    facts += [text(fact) for fact in (node.instance_type, node.capacity_type, node.region) if fact]
    health = [f"<li>{one}</li>" for one in page_sources.chips(snapshot)]
    health.append(f"<li>{_attribution_chip(snapshot)}</li>")
    if snapshot.metadata_enabled:
        health.append(f"<li>{_metadata_chip(snapshot)}</li>")
    return (
        '<header class="top"><div><p class="eyebrow">gpu-cost-exporter · node</p>'
        f'<h1>{text(snapshot.node)}</h1><p class="facts">{" · ".join(facts) or "no driver seen yet"}</p></div>'
        f'<ul class="health" aria-label="Health">{"".join(health)}</ul></header>'
    )


def _attribution_chip(snapshot: Snapshot) -> str:
    if not snapshot.attribution_enabled:
        return chip("free", "pods not asked for")
    if not snapshot.attribution_known:
        return chip("bad", "pods unknown")
    age = snapshot.taken_at_seconds - (snapshot.attribution_at_seconds or snapshot.taken_at_seconds)
    stale = bool(snapshot.attribution_problem)
    return chip("idle" if stale else "ok", f"pods known, {duration(age)} ago" if stale else "pods known")


def _metadata_chip(snapshot: Snapshot) -> str:
    if not snapshot.metadata_known:
        return chip("bad", "owners unknown") if snapshot.metadata_problem else chip("unknown", "owners not read yet")
    if not snapshot.metadata_problem:
        return chip("ok", "owners known")
    age = snapshot.taken_at_seconds - (snapshot.metadata_at_seconds or snapshot.taken_at_seconds)
    return chip("idle", f"owners known, {duration(age)} ago")


def _hint(snapshot: Snapshot) -> str:
    """Who pays, where that is not as precise as it could be."""
    if snapshot.metadata_enabled or not snapshot.attribution_enabled:
        return ""
    how = '<span class="mono">--kube-metadata on</span> tells workloads, teams and queues.'
    return f'<p class="hint">Namespaces pay: pod metadata is off. {how}</p>'


def _disagreement(snapshot: Snapshot) -> str:
    """Driver, device plugin and kubelet count the same GPUs; where they do not, which of them sees how many."""
    if snapshot.sample_at_seconds is None:
        return ""
    seen, advertised, held = present(snapshot), snapshot.advertised_devices, snapshot.allocated_devices
    if advertised in {None, seen} and (held is None or held <= seen):
        return ""
    counts = ((seen, "seen by the driver"), (advertised, "advertised by the kubelet"), (held, "held by pods"))
    return ", ".join(f"{count} {what}" for count, what in counts if count is not None)


def _problems(snapshot: Snapshot) -> str:
    shown = page_sources.problems(snapshot)
    if snapshot.attribution_problem:
        shown.append(f"<strong>pods</strong>: {text(snapshot.attribution_problem)}")
    if snapshot.metadata_problem:
        shown.append(f"<strong>owners</strong>: {text(snapshot.metadata_problem)}")
    if counts := _disagreement(snapshot):
        shown.append(f"<strong>GPUs</strong>: {counts}")
    if snapshot.ledger and snapshot.ledger.state_problem:
        shown.append(f"<strong>ledger</strong>: {text(snapshot.ledger.state_problem)}")
    if snapshot.ledger_note:
        shown.append(f"<strong>ledger</strong>: {text(snapshot.ledger_note)}")
    if not snapshot.ready and not shown:
        shown = [f"<strong>not ready</strong>: {text(reason)}" for reason in snapshot.not_ready_reasons]
    return "".join(f'<p class="problem">{line}</p>' for line in shown)


def _unresolved(snapshot: Snapshot) -> str:
    if not snapshot.unresolved:
        return ""
    items = "".join(
        f"<li>{text(item.namespace)}/<b>{text(item.pod)}</b> "
        f'<span class="meta">{text(item.container)} · {text(item.resource)}</span> '
        f'<span class="mono">{text(item.device_id)}</span>: {words(item.reason)}</li>'
        for item in snapshot.unresolved
    )
    return (
        '<section class="panel" aria-labelledby="unresolved"><h2 id="unresolved">Devices whose holders are in doubt'
        f'</h2><ul class="notes">{items}</ul></section>'
    )


def _foot(snapshot: Snapshot) -> str:
    sampled = snapshot.sample_at_seconds
    age = "" if sampled is None else f", read from the driver {duration(snapshot.taken_at_seconds - sampled)} before"
    return (
        f"<footer><span>As of {moment(snapshot.taken_at_seconds)}{age}</span>"
        '<span><a id="to-metrics" href="/metrics">metrics</a> · <a id="to-json" href="/api/v1/devices">JSON</a> · '
        f'<a id="to-ready" href="/readyz">readiness</a> · gpu-cost-exporter {__version__}</span></footer>'
    )
