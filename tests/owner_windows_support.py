"""A node whose owners are judged: samples through the meter into the windows, with time as an argument."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from metering_support import namespace_pays

from exporter.accounting.meter import Meter
from exporter.accounting.owner_figures import owners_view
from exporter.accounting.windows import Windows
from exporter.model.attribution import Holder, Owner, PodFacts
from exporter.model.ledger import OwnersView, OwnerUse, Price
from exporter.model.snapshot import Activity, ActivitySource, DeviceView, PodUse

STEP = 30.0
MINUTE, HOUR = 60.0, 3600.0
DOLLARS = Price(per_hour=4.0, currency="USD", source="test:1", as_of="2026-01-01")
TRAIN = Owner(namespace="ml", kind="Job", name="train", team="vision")


def held(
    holder: Holder,
    ratio: float | None,
    owner: Owner | None = TRAIN,
    *,
    source: ActivitySource = ActivitySource.ENGINE,
    workload_class: str = "",
    off_until: float | None = None,
    idle_for: float | None = None,
    age: float = 1.0,
) -> PodUse:
    """Make a use; ``ratio`` is of the device, ``owner`` None while it is not known."""
    facts = owner and PodFacts(owner=owner, workload_class=workload_class, opt_out_until_seconds=off_until)
    activity = None if ratio is None else Activity(ratio=ratio, source=source)
    return PodUse(holder=holder, age_seconds=age, activity=activity, idle_for_seconds=idle_for, facts=facts)


@dataclass(slots=True)
class OwnedNode:
    """Samples every ``STEP`` seconds."""

    owner_of: Callable[[Holder], Owner] = namespace_pays
    prices: Mapping[str, Price] = field(default_factory=dict)
    windows: Windows = field(default_factory=Windows)
    now: float = 0.0
    views: Sequence[DeviceView] = ()
    _owners: dict[Holder, Owner] = field(default_factory=dict)
    _meter: Meter | None = None

    def sample(self, views: Sequence[DeviceView]) -> None:
        """Take one sample now."""
        self._owners = {
            use.holder: use.facts.owner
            if use.facts
            else Owner(namespace=use.holder.namespace, kind="Pod", name=use.holder.pod, provisional=True)
            for view in views
            for use in view.pods
        }
        self._meter = self._meter or Meter(STEP, lambda holder: self._owners[holder])
        self.windows.add(self._meter.add(views, self.now), self.now)
        self.views = views

    def until(self, seconds: float, *views: DeviceView) -> None:
        """Sample the same views up to an instant."""
        self.sample(views)
        while self.now < seconds:
            self.now = min(self.now + STEP, seconds)
            self.sample(views)

    def view(self) -> OwnersView:
        """Return what is shown now."""
        free = self._meter.free_shares() if self._meter else {}
        return owners_view(self.views, self.windows.at(self.now), self.prices, free, self.now)

    def use(self, owner: Owner = TRAIN) -> OwnerUse:
        """Return what is shown of one owner."""
        return next(use for use in self.view().owners if use.owner == owner)


def renamed(view: DeviceView, uuid: str) -> DeviceView:
    """Return the same device under another UUID."""
    return replace(view, gpu=replace(view.gpu, uuid=uuid))
