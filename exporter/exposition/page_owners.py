"""What each owner holds now, how busy it is and what it costs per hour; and what nobody holds."""

from dataclasses import dataclass

from exporter.exposition import page_money
from exporter.exposition.page_summary import is_idle, pod_key
from exporter.exposition.page_table import cell, row
from exporter.exposition.page_text import UNKNOWN, bar, chip, percent, text
from exporter.exposition.page_whose import named
from exporter.exposition.tenants import owner_of
from exporter.model import DeviceView, Owner, PodUse, Snapshot

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
        owner: (-sum(page_money.rates(snapshot, one.uses).values()), -one.gpus, *_names(owner))
        for owner, one in holdings.items()
    }
    order = sorted(holdings, key=rank.__getitem__)
    rows = [_row(_title(owner, snapshot), holdings[owner], snapshot) for owner in order[:_ROWS_AT_MOST]]
    if rest := order[_ROWS_AT_MOST:]:
        together = _Holding([use for owner in rest for use in holdings[owner].uses])
        rows.append(_row(f"{len(rest)} more owners", together, snapshot))
    rows += _nobody(snapshot)
    money = ("Per hour",) if page_money.is_shown(snapshot) else ()
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
    if page_money.is_shown(snapshot):
        rates = page_money.rates(snapshot, one.uses)
        without = page_money.unpriced(snapshot, one.uses)
        more = ' <span class="dim">and more without price</span>' if rates and without else ""
        cells.append(cell("num cost", "Per hour", page_money.amounts(rates) + more if rates else page_money.NO_PRICE))
    return row("owner", title, cells)


def _nobody(snapshot: Snapshot) -> list[str]:
    """What is free, stranded slices and shares included; GPUs of which holders are not known are left out."""
    free = sum(page_money.unheld(snapshot).values())
    if free < _SHOWN_GPUS:
        return []
    cells = [cell("act", "", ""), cell("since", "", ""), cell("num", "GPUs", _gpus(free))]
    if page_money.is_shown(snapshot):
        rates = page_money.unheld_rates(snapshot)
        cells.append(cell("num", "Per hour", page_money.amounts(rates) if rates else page_money.NO_PRICE))
    return [row("owner dim", "nobody", cells)]


def _gpus(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
