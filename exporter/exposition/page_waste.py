"""Who holds a device and does nothing, workload by workload, and what that has cost."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from exporter.exposition import page_money
from exporter.exposition.page_summary import is_idle, place, pod_key
from exporter.exposition.page_text import brief, duration, model, text
from exporter.exposition.page_whose import alerts_off, named, pod_name, whose
from exporter.exposition.tenants import owner_of
from exporter.model import DeviceView, PodUse, Snapshot

_NAMED_AT_MOST = 8

_Uses = list[tuple[DeviceView, PodUse]]


@dataclass(frozen=True, slots=True)
class _Idler:
    """The idle pods of one workload; a pod whose workload is not known stands alone."""

    pods: dict[tuple[str, str], _Uses] = field(default_factory=dict)

    @property
    def uses(self) -> _Uses:
        return [use for uses in self.pods.values() for use in uses]

    def idle_seconds(self) -> list[float]:
        """By pod; one with several devices is idle since the last of them went idle."""
        return [min(use.idle_for_seconds or 0.0 for _, use in uses) for uses in self.pods.values()]

    def spent(self, snapshot: Snapshot) -> dict[str, float]:
        """Money since each of them went idle, by currency, at the price of now."""
        spent: dict[str, float] = {}
        for uses, seconds in zip(self.pods.values(), self.idle_seconds(), strict=True):
            for currency, rate in page_money.rates(snapshot, uses).items():
                spent[currency] = spent.get(currency, 0.0) + rate * seconds / 3600
        return spent


def waste(snapshot: Snapshot) -> str:
    """Idle workloads by what that has cost, then longest first; empty where nobody idles."""
    idlers = _idlers(snapshot)
    if not idlers:
        return ""
    rates = page_money.rates(snapshot, (use for idler in idlers.values() for use in idler.uses))
    cost = f" <small>{page_money.amounts(rates)} an hour</small>" if rates else ""
    rank = {
        key: (-sum(idler.spent(snapshot).values()), -max(idler.idle_seconds()), key) for key, idler in idlers.items()
    }
    dearest = sorted(idlers, key=rank.__getitem__)
    lines = [_line(idlers[key], snapshot) for key in dearest[:_NAMED_AT_MOST]]
    if len(idlers) > _NAMED_AT_MOST:
        lines.append(f'<li class="meta">and {len(idlers) - _NAMED_AT_MOST} more, marked in the table</li>')
    return (
        f'<section class="panel waste" aria-labelledby="waste"><h2 id="waste">Held, but idle{cost}</h2>'
        f"<ol>{''.join(lines)}</ol></section>"
    )


def _idlers(snapshot: Snapshot) -> dict[tuple[str, str, str], _Idler]:
    idlers: dict[tuple[str, str, str], _Idler] = {}
    for view in snapshot.devices:
        for use in view.pods:
            if is_idle(use):
                owner = owner_of(use)
                key = (owner.namespace, owner.kind, owner.name) if owner.name else (*pod_key(use), "")
                pods = idlers.setdefault(key, _Idler()).pods
                pods.setdefault(pod_key(use), []).append((view, use))
    return idlers


def _line(idler: _Idler, snapshot: Snapshot) -> str:
    uses = idler.uses
    places = _places(view for view, _ in uses)
    kind = model(uses[0][0].gpu.model)
    return (
        f'<li><span class="for">idle for {_since(idler.idle_seconds())}</span>'
        f"{_money(idler, snapshot)}{_who(idler, snapshot)}"
        f' <span class="meta">{places} · {kind}</span></li>'
    )


def _places(views: Iterable[DeviceView]) -> str:
    return ", ".join(dict.fromkeys(place(view) for view in views))


def _since(idle_seconds: list[float]) -> str:
    shortest, longest = min(idle_seconds), max(idle_seconds)
    return duration(shortest) if brief(shortest) == brief(longest) else f"{brief(shortest)} to {brief(longest)}"


def _who(idler: _Idler, snapshot: Snapshot) -> str:
    _, use = idler.uses[0]
    if len(idler.pods) == 1:
        about = whose(use, snapshot)
        return f'<span class="pod">{pod_name(use)}</span>' + (f' <span class="meta">{about}</span>' if about else "")
    owner = owner_of(use)
    team = f" · team {text(owner.team)}" if owner.team else ""
    # They have one template as a rule, and so one word on alerts; where they have not, the table tells.
    off = {alerts_off(one.facts, snapshot.taken_at_seconds) for _, one in idler.uses}
    word = f" {off.pop()}" if len(off) == 1 else ""
    return (
        f'<span class="pod">{named(owner.namespace, owner.name)}</span>'
        f' <span class="meta">{text(owner.kind)} · {len(idler.pods)} pods{team}{word}</span>'
    )


def _money(idler: _Idler, snapshot: Snapshot) -> str:
    """What an idle workload has cost since it went idle, at the price of now, and goes on to cost per hour."""
    if not page_money.is_shown(snapshot):
        return ""
    costs = page_money.rates(snapshot, idler.uses)
    if not costs:
        return f'<span class="money">{page_money.NO_PRICE}</span>'
    return (
        '<span class="money" title="since it went idle, at the price of now">'
        f"{page_money.amounts(idler.spent(snapshot))}"
        f' <span class="meta">at {page_money.amounts(costs)} an hour</span></span>'
    )
