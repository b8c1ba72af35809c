"""The agent's page: server-rendered, live by a small script, whole without it; loads nothing from anywhere else."""

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from exporter import __version__
from exporter.metrics.catalog import owner_of
from exporter.metrics.collector import present
from exporter.model import (
    ActivitySource,
    DeviceView,
    Owner,
    PodUse,
    ProfilingState,
    Snapshot,
    SourceState,
    SourceStatus,
)
from exporter.web import formatting
from exporter.web.formatting import UNKNOWN, bar, chip, duration, moment, percent, prices, text, words
from exporter.web.node_summary import glance, is_idle, pod_key, tiles
from exporter.web.node_tables import cell, named, row, table, waste

_STATE_CSS = {SourceState.UP: "ok", SourceState.STARTING: "unknown", SourceState.RELEASED: "idle"}
_QUIET = frozenset({SourceState.UP, SourceState.STARTING})
_NAMES = {"nvml": "NVML", "dcgm": "DCGM"}

_PROFILING = {
    ProfilingState.PAUSED: (
        "is paused, for the whole host engine",
        'once whoever paused it is done: <span class="mono">dcgmi profile --resume</span>',
    ),
    ProfilingState.NO_MODULE: (
        "is not there: the host engine could not load its profiling module",
        "install NVIDIA's full package of DCGM, which has that module, and start the host engine again",
    ),
    ProfilingState.NO_PERMISSION: (
        "is not permitted to the host engine",
        "run it as root, or with CAP_SYS_ADMIN",
    ),
    ProfilingState.REFUSED: (
        "is refused",
        "end the profiler that has the counters, or update the driver; the host engine's log says which",
    ),
}
"""What is so, and how to mend it. A model that DCGM does not profile has no mend, and is no problem."""


def chips(snapshot: Snapshot) -> list[str]:
    """A chip per source; one that is down while the other works is a loss, and not a failure of the node."""
    return [
        chip(
            _STATE_CSS.get(source.state, "idle" if snapshot.ready else "bad"),
            f"{text(source.name)} {source.state.value}",
        )
        for source in snapshot.sources
    ]


def problems(snapshot: Snapshot) -> list[str]:
    """One line for each source that is down and for each reason why DCGM does not profile. Safe."""
    lines = [
        f"<strong>{text(source.name)} {source.state.value}</strong>: {text(source.message) or words(source.reason)}"
        f"{_meanwhile(source, snapshot)}"
        for source in snapshot.sources
        if source.state not in _QUIET and (source.message or source.reason)
    ]
    for state, (what, mend) in _PROFILING.items():
        indexes = sorted(view.gpu.index for view in snapshot.devices if view.profiling is state and _lacks(view))
        if indexes:
            gpus = ", ".join(map(str, indexes))
            lines.append(f"<strong>DCGM's profiling</strong> {what}; GPU {gpus} lacks what it measures. Mend: {mend}")
    return lines


def _meanwhile(source: SourceStatus, snapshot: Snapshot) -> str:
    others = [one.name for one in snapshot.sources if one.name != source.name and one.state is SourceState.UP]
    return f" (meanwhile {_NAMES.get(others[0], text(others[0]))} measures alone)" if others else ""


def _lacks(view: DeviceView) -> bool:
    """Whether a GPU has no engine counter from NVML, which then has the other profiling fields, too."""
    activity = view.activity
    by_nvml = activity is not None and activity.measured_by == "nvml" and activity.source is ActivitySource.ENGINE
    return view.instance is None and not by_nvml


_ROWS_AT_MOST = 20
_SHOWN_GPUS = 0.005

_Uses = list[tuple[DeviceView, PodUse]]
_HEADS = ("Owner", "Activity", "Idle", "GPUs")


@dataclass(frozen=True, slots=True)
class _Holding:
    uses: _Uses

    @property
    def gpus(self) -> float:
        return sum(use.holder.share_ratio for _, use in self.uses)

    @property
    def idle_gpus(self) -> float:
        return sum(use.holder.share_ratio for _, use in self.uses if is_idle(use))

    @property
    def activity_ratio(self) -> float | None:
        """Of what it holds, weighted by share; what is not measured is left out."""
        known = [
            (use.holder.share_ratio, min(1.0, use.activity.ratio / use.holder.device_share_ratio))
            for _, use in self.uses
            if use.activity is not None and use.holder.device_share_ratio > 0
        ]
        whole = sum(share for share, _ in known)
        return sum(share * ratio for share, ratio in known) / whole if whole else None


def owners(snapshot: Snapshot) -> str:
    """Owners by what they cost, then by GPUs; empty where nobody holds anything."""
    by_owner: dict[Owner, _Uses] = {}
    for view in snapshot.devices:
        for use in view.pods:
            by_owner.setdefault(owner_of(use), []).append((view, use))
    if not by_owner:
        return ""
    holdings = {owner: _Holding(uses) for owner, uses in by_owner.items()}
    rank = {
        owner: (-sum(formatting.rates(snapshot, one.uses).values()), -one.gpus, *_names(owner))
        for owner, one in holdings.items()
    }
    order = sorted(holdings, key=rank.__getitem__)
    rows = [_row(_title(owner, snapshot), holdings[owner], snapshot) for owner in order[:_ROWS_AT_MOST]]
    if rest := order[_ROWS_AT_MOST:]:
        together = _Holding([use for owner in rest for use in holdings[owner].uses])
        rows.append(_row(f"{len(rest)} more owners", together, snapshot))
    rows += _nobody(snapshot)
    money = ("Per hour",) if formatting.is_shown(snapshot) else ()
    heads = "".join(f'<th role="columnheader" scope="col"{_right(title)}>{title}</th>' for title in (*_HEADS, *money))
    return (
        '<div class="panel"><table role="table" class="owners">'
        "<caption>Owners <small>what they hold now</small></caption>"
        f'<thead><tr role="row">{heads}</tr></thead><tbody role="rowgroup">{"".join(rows)}</tbody></table></div>'
    )


def _right(title: str) -> str:
    return "" if title in {"Owner", "Activity", "Idle"} else ' class="num"'


def _names(owner: Owner) -> tuple[str, str, str, str]:
    return owner.namespace, owner.kind, owner.name, owner.team


def _title(owner: Owner, snapshot: Snapshot) -> str:
    if owner.name:
        name, about = named(owner.namespace, owner.name), text(owner.kind)
    else:
        name = f"<b>{text(owner.namespace)}</b>"
        about = "owner not known yet" if snapshot.metadata_enabled else "namespace"
    team = f" · team {text(owner.team)}" if owner.team else ""
    return f'<span class="pod">{name} <span class="meta">{about}{team}</span></span>'


def _row(title: str, one: _Holding, snapshot: Snapshot) -> str:
    ratio, idle = one.activity_ratio, one.idle_gpus
    pods = len({pod_key(use) for _, use in one.uses})
    shown = (
        f'<div class="actrow">{bar(ratio)}<span class="val">{percent(ratio)}</span></div>'
        if ratio is not None
        else UNKNOWN
    )
    cells = [
        cell("act", "Activity", shown),
        cell("since", "Idle", chip("idle", f"{_gpus(idle)} idle") if idle >= _SHOWN_GPUS else ""),
        cell("num", "GPUs", f'{_gpus(one.gpus)} <span class="dim">in {pods} pod{"s" if pods > 1 else ""}</span>'),
    ]
    if formatting.is_shown(snapshot):
        rates = formatting.rates(snapshot, one.uses)
        without = formatting.unpriced(snapshot, one.uses)
        more = ' <span class="dim">and more without price</span>' if rates and without else ""
        cells.append(cell("num cost", "Per hour", formatting.amounts(rates) + more if rates else formatting.NO_PRICE))
    return row("owner", title, cells)


def _nobody(snapshot: Snapshot) -> list[str]:
    """What is free, stranded slices and shares included; GPUs of which holders are not known are left out."""
    free = sum(formatting.unheld(snapshot).values())
    if free < _SHOWN_GPUS:
        return []
    cells = [cell("act", "", ""), cell("since", "", ""), cell("num", "GPUs", _gpus(free))]
    if formatting.is_shown(snapshot):
        rates = formatting.unheld_rates(snapshot)
        cells.append(cell("num", "Per hour", formatting.amounts(rates) if rates else formatting.NO_PRICE))
    return [row("owner dim", "nobody", cells)]


def _gpus(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


_STATIC = files("exporter.web") / "static"
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
    health = [f"<li>{one}</li>" for one in chips(snapshot)]
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
    shown = problems(snapshot)
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
