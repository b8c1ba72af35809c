"""Checks after every tick of a node with a known truth; each violation is kept with its seed and instant."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from page_checks import NEAR_RATIO, PageChecks, near
from virtual_node import EXPIRY_SECONDS, INTERVAL_SECONDS, Agent, Charge
from virtual_world import BUSY_WATTS, HISTORY_SECONDS, IDLE_WATTS, Board, Held, Span, World, place_of

from exporter.accounting.ledger import Sheet
from exporter.model.attribution import UNALLOCATED, UNATTRIBUTED
from exporter.model.devices import DeviceState, Reading
from exporter.model.fields import Field
from exporter.model.ledger import Portion, Price

BUSY_RATIO = 0.06
"""Activity slightly above the idle threshold."""
UNSEEN_SECONDS = 4.0
"""Longest time that can fall between two samples without a gap."""
ASKED_SECONDS = 6.0
"""Time within which the kubelet is polled again."""
Owner = tuple[str, str, str, str]
MOST_FORMER = 9
"""Most ended ledgers that stay."""


@dataclass(slots=True)
class Expected:
    """Expected content of the books, computed separately from the truth; a killed agent returns to its saved state."""

    capacity: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    """Monotonic time up to which each GPU is metered."""
    owners: defaultdict[Owner, float] = field(default_factory=lambda: defaultdict(float))
    money: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    unpriced: float = 0.0
    boot: str = ""
    counted: dict[str, float] = field(default_factory=dict)
    """True time of the last reading of each GPU's energy counter."""
    watched: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """True times, start and end, in which each GPU was sampled without a gap."""
    dropped: dict[str, Sheet] = field(default_factory=dict)
    """Ended ledgers that were dropped for their age or number, by identity."""
    replicas: dict[str, int] = field(default_factory=dict)
    """Replicas of each GPU, as the kubelet last advertised it to the process that wrote these books."""

    def continue_from(self, noted: "Expected") -> None:
        """Meter from the time up to which another process had shown unsaved time, if that is later."""
        if self.boot != noted.boot or max(noted.last.values(), default=0.0) > max(self.last.values(), default=0.0):
            # Idle clocks come from the state file.
            self.watched = dict(self.watched) if self.boot == noted.boot else {}
            self.last, self.boot = dict(noted.last), noted.boot
            self.counted = dict(noted.counted)

    def copy(self) -> Self:
        """Return an independent copy."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        return type(self)(**{name: value.copy() if isinstance(value, dict) else value for name, value in own.items()})


@dataclass(slots=True)
class Interval:
    """One GPU between two of its readings, in true time."""

    uuid: str
    start: float
    end: float
    seconds: float
    seen: bool
    state: DeviceState
    devices: frozenset[str]
    spans: list[Span]


@dataclass(slots=True, kw_only=True)
class Checks(PageChecks):
    """Counts checks and keeps the failed ones."""

    world: World
    counts: str = "gpu_pod_"
    metered: float = 0.0
    """Seconds of all GPUs that any agent has metered, each counted once."""
    metered_until: dict[str, float] = field(default_factory=dict)
    """True time up to which each GPU was metered."""

    def hold(self, name: str, what: str, *, true: bool) -> None:
        """Count one check, and note a failure."""
        self.expect(name, true, self.world.t, what)

    # ---- one reading

    def reading(
        self,
        reading: Reading,
        charged: list[Charge],
        expected: Expected,
        agent: Agent,
        boot_t: float,
        known: set[str],
    ) -> None:
        """Check the charges of one reading, and enter the expected ones."""
        portions = tuple(portion for parts, _ in charged for portion in parts)
        steady = reading.steady_seconds or 0.0
        states = {gpu.gpu.uuid: gpu.state for gpu in reading.gpus}
        devices = {
            gpu.gpu.uuid: frozenset([gpu.gpu.uuid, *(part.instance.uuid for part in gpu.instances)])
            for gpu in reading.gpus
        }
        known |= {uuid for uuid, state in states.items() if state is DeviceState.UP}
        # Another GPU in the place of one is evidence of its removal: it has no seconds any more.
        places = {gpu.gpu.pci_bus_id: gpu.gpu.uuid for gpu in reading.gpus if gpu.state is DeviceState.UP}
        known -= {uuid for uuid in known if places.get(place_of(uuid), uuid) != uuid}
        by_gpu: dict[str, list[Portion]] = {}
        for portion in portions:
            by_gpu.setdefault(portion.gpu_uuid, []).append(portion)
        for uuid in states.keys() | known:
            before = expected.last.get(uuid)
            if before is None or steady <= before:
                self.hold("conservation", f"{uuid} charged without an interval", true=uuid not in by_gpu)
                expected.last.setdefault(uuid, steady)
                continue
            expected.last[uuid] = steady
            length = steady - before
            expected.capacity += length
            one = Interval(
                uuid=uuid,
                start=boot_t + before,
                end=boot_t + steady,
                seconds=length,
                seen=length <= max(3 * INTERVAL_SECONDS, 2.0),
                state=states.get(uuid, DeviceState.MISSING),
                devices=devices.get(uuid, frozenset([uuid])),
                spans=list(self.world.spans(boot_t + before, boot_t + steady)),
            )
            until = self.metered_until.get(uuid, one.start)
            self.metered += max(0.0, one.end - max(one.start, until))
            self.metered_until[uuid] = max(one.end, until)
            portions_of_gpu = by_gpu.pop(uuid, [])
            self._interval(one, portions_of_gpu, agent, expected)
            # While its holders are unknown, no holder counts as busy: an idle clock neither counts nor restarts.
            if any(portion.pod for portion in portions_of_gpu):
                expected.watched[uuid] = self._watched(expected.watched.get(uuid, ()), one)
        for gpu in reading.gpus:
            if Field.TOTAL_ENERGY_CONSUMPTION in gpu.values and expected.last.get(gpu.gpu.uuid) == steady:
                expected.counted[gpu.gpu.uuid] = boot_t + steady
        for uuid in by_gpu.keys() - states.keys() - known:
            self.hold("conservation", f"{uuid} is an unknown GPU", true=False)
        for parts, prices in charged:
            self._money(parts, prices, expected)

    def _interval(self, one: Interval, portions: list[Portion], agent: Agent, expected: Expected) -> None:
        total = sum(portion.seconds.total for portion in portions)
        self.hold(
            "conservation", f"{one.uuid}: {total} of {one.seconds} s", true=near(total, one.seconds, absolute=1e-9)
        )
        active = sum(portion.seconds.active for portion in portions)
        idle = sum(portion.seconds.idle for portion in portions)
        if not one.seen or one.state is not DeviceState.UP:
            what = f"{one.uuid} {one.state}, {one.seconds:.1f} s: active {active}, idle {idle}"
            self.hold("unknown, not idle", what, true=active == 0 and idle == 0)
        exact = self._attribution(one, portions, agent, expected)
        if one.seen and one.state is DeviceState.UP and one.spans:
            busiest = max(span.busy.get(one.uuid, 0.0) for span in one.spans)
            least = min(span.busy.get(one.uuid, 0.0) for span in one.spans)
            what = f"{one.uuid}: active {active}, idle {idle} of {one.seconds}; truth {least}..{busiest}"
            if exact:
                self.hold("activity", what, true=active <= busiest * one.seconds + 1e-6)
                # Use of an unknown pod is divided by share, also to holders that use all of theirs: that part is idle.
                divided = any(portion.estimated for portion in portions)
                self.hold("no false idle", what, true=divided or idle <= (1 - least) * one.seconds + 1e-6)
        self._joules(one, portions, expected.counted.get(one.uuid))

    def _attribution(self, one: Interval, portions: list[Portion], agent: Agent, expected: Expected) -> bool:
        """Check the charged owners; return whether the agent's holders were the true ones all the time."""
        kubelet, api = agent.kubelet, agent.api
        age = self.world.t - kubelet.asked_at
        ended = api.ended if api else frozenset()
        held = {
            (namespace, pod, device): uid
            for namespace, pod, uid, device in kubelet.held
            if self.world.known[uid].unit.gpu_uuid == one.uuid
        }
        # A GPU that was divided again seems unchanged until the kubelet advertises it.
        divided = {round(1 / unit.of_device) for unit in (self.world.known[uid].unit for uid in held.values())}
        advertised = expected.replicas.get(one.uuid)
        is_outdated = advertised is not None and not divided <= {1, advertised}
        charged = free = 0.0
        for portion in portions:
            if portion.pod is None:
                owner = portion.account.owner
                self.hold("owner", f"{owner} without a pod", true=owner in (UNALLOCATED, UNATTRIBUTED))
                expected.owners[owner.namespace, owner.kind, owner.name, owner.team] += portion.seconds.total
                free += portion.seconds.total if owner == UNALLOCATED else 0.0
                continue
            charged += portion.seconds.total
            key = (portion.pod.namespace, portion.pod.pod, portion.pod.device_uuid)
            what = f"{key} charged {portion.seconds.total:.3f} s of {one.seconds:.3f}; answer {age:.0f} s old"
            self.hold("holder", what, true=key in held and age <= EXPIRY_SECONDS + 5)
            if key in held:
                # The API may know of the next pod of a name before the next poll of the kubelet, and is right.
                now = {uid for span in one.spans for (*name, uid, device) in span.levels if (*name, device) == key}
                now |= {one.uid for one in [self.world.pods.get(key[:2])] if one is not None}
                uid = portion.pod.pod_uid or held[key]
                if age <= ASKED_SECONDS:
                    self.hold("which pod", f"{what}: {uid}", true=uid in now | {held[key]})
                pod = self.world.known[uid]
                if not is_outdated:  # of the device in the last answer of the kubelet; a later pod may hold another one
                    share = self.world.known[held[key]].unit.share
                    self.hold("share", what, true=portion.seconds.total <= share * one.seconds + 1e-9)
                expected.owners[pod.owner if api else (pod.namespace, "", "", "")] += portion.seconds.total
        if age > EXPIRY_SECONDS + 5:  # or the kubelet has never answered
            what = f"{one.uuid}: {free} s free; answer {age:.0f} s old"
            self.hold("no held time is Unallocated", what, true=free == 0)
        if one.seen and age <= EXPIRY_SECONDS - 5 and kubelet.latest is not None:
            shares = sum(
                self.world.known[uid].unit.share
                for (namespace, pod, device), uid in held.items()
                if (namespace, pod) not in ended and (device in one.devices or one.state is not DeviceState.UP)
            )
            if one.state is DeviceState.UP and not is_outdated:
                what = f"{one.uuid}: {charged} s at pods, {shares} x {one.seconds}, {free} s free"
                # The holders of a shared GPU that was never advertised may be unknown, but it is not free.
                is_unknown = advertised is None and max(divided, default=1) > 1 and charged == free == 0
                self.hold("no holder is forgotten", what, true=is_unknown or near(charged, shares * one.seconds))
                most = (1 - shares) * one.seconds
                self.hold("no held time is Unallocated", what, true=free <= most + 1e-6 * one.seconds)
        return not is_outdated and self._is_exact(one, kubelet.held, ended, age)

    def _is_exact(self, one: Interval, held: frozenset[Held], ended: frozenset[tuple[str, str]], age: float) -> bool:
        mine = {entry for entry in held if self.world.known[entry[2]].unit.gpu_uuid == one.uuid}
        if age > EXPIRY_SECONDS or any((namespace, pod) in ended for namespace, pod, _, _ in mine):
            return False
        return all(
            {entry for entry in span.levels if self.world.known[entry[2]].unit.gpu_uuid == one.uuid} == mine
            for span in one.spans
        )

    def _joules(self, one: Interval, portions: list[Portion], counted: float | None) -> None:
        """Check that the charged energy was used; ``counted`` is the time of the counter's last reading."""
        joules = [portion.energy_joules for portion in portions if portion.energy_joules is not None]
        board: Board | None = next((board for board in self.world.boards if board.uuid == one.uuid), None)
        start = one.start if counted is None else min(one.start, counted)
        if not joules or board is None or start < self.world.t - HISTORY_SECONDS:
            return
        spans = list(self.world.spans(start, one.end))
        watts = [IDLE_WATTS + BUSY_WATTS * span.busy.get(one.uuid, 0.0) for span in spans]
        used = sum(
            power * (min(span.end, one.end) - max(span.start, start)) for power, span in zip(watts, spans, strict=True)
        )
        most = used if board.counts_energy else max(watts) * one.seconds
        what = f"{one.uuid}: {sum(joules)} J of {most} J in {one.seconds} s"
        self.hold("energy", what, true=sum(joules) <= most * (1 + 1e-6) + 1e-3)

    def _money(self, portions: tuple[Portion, ...], prices: Mapping[str, Price], expected: Expected) -> None:
        for portion in portions:
            price = prices.get(portion.gpu_uuid)
            if price is None:
                expected.unpriced += portion.seconds.total
                continue
            paid = portion.seconds.total * price.per_hour / 3600
            paid += (portion.energy_joules or 0.0) * price.per_kwh / 3.6e6
            expected.money[price.currency] += paid

    # ---- the books as a whole

    def books(self, agent: Agent, expected: Expected) -> None:
        """Check the sums of the ledger against the expected ones."""
        sheets = agent.ledgers.sheets()
        totals = [totals for sheet in sheets for totals in sheet.accounts.values()]
        allocated = sum(one.seconds.total for one in totals)
        capacity = sum(one.capacity_seconds + one.provisional_seconds for one in sheets)
        what = f"{allocated} allocated, {capacity} capacity, {expected.capacity} in truth"
        self.hold("books", what, true=near(allocated, capacity))
        self.hold("books", what, true=near(capacity, expected.capacity))
        for currency, truly in expected.money.items():
            paid = sum(one.money[currency].total for one in totals if currency in one.money)
            self.hold("cost", f"{paid} {currency}, {truly} in truth", true=near(paid, truly))
        unpriced = sum(one.unpriced_seconds for one in totals)
        self.hold("cost", f"{unpriced} s unpriced, {expected.unpriced}", true=near(unpriced, expected.unpriced))

    def owners(self, agent: Agent, expected: Expected) -> None:
        """Check that every owner has the seconds of its pods, once everything is known.

        A pod that the API never showed in its life pays for itself, under its own name and without a team. Successive
        pods of one name are then one line, and only their sum can be checked.
        """
        jobs: dict[Owner, set[Owner]] = {}
        for pod in self.world.known.values():
            jobs.setdefault((pod.namespace, "Pod", pod.name, ""), set()).add(pod.owner)
        found: defaultdict[Owner, float] = defaultdict(float)
        for account, tally in (line for sheet in agent.ledgers.sheets() for line in sheet.accounts.items()):
            owner = account.owner
            found[owner.namespace, owner.kind, owner.name, owner.team] += tally.seconds.total
        for name in jobs.keys() & found.keys() if agent.api else ():
            self._share_out(found, found.pop(name), jobs[name], expected)
        for owner in found.keys() | expected.owners.keys():
            mine, truly = found[owner], expected.owners[owner]
            self.hold("owners", f"{owner}: {mine:.3f} s, {truly:.3f} in truth", true=near(mine, truly, 1e-6))

    def _share_out(self, found: dict[Owner, float], seconds: float, owners: set[Owner], expected: Expected) -> None:
        """Add the seconds under a pod name to its owners: at most the missing ones to each, the rest to the last."""
        for number, owner in enumerate(sorted(owners), 1):
            mine = found.get(owner, 0.0)
            part = seconds if number == len(owners) else min(seconds, max(0.0, expected.owners.get(owner, 0.0) - mine))
            if part:
                found[owner], seconds = mine + part, seconds - part

    def _watched(self, before: tuple[tuple[float, float], ...], one: Interval) -> tuple[tuple[float, float], ...]:
        """Add an interval to the times in which a GPU was sampled, and drop times before the history."""
        recent = tuple(run for run in before if run[1] > self.world.t - HISTORY_SECONDS)
        if not one.seen or one.state is not DeviceState.UP:
            return recent
        if recent and near(recent[-1][1], one.start):
            return (*recent[:-1], (recent[-1][0], one.end))
        return (*recent, (one.start, one.end))

    def idle(self, agent: Agent, expected: Expected) -> None:
        """Check that no holder is idle for longer than since its last busy time, if a sample must have seen that."""
        held = {(namespace, pod, device): uid for namespace, pod, uid, device in agent.kubelet.held}
        for view in agent.snapshot.devices if agent.snapshot else ():
            for use in view.pods:
                uid = held.get((use.holder.namespace, use.holder.pod, view.uuid))
                if use.idle_for_seconds is None or uid is None or self.world.known[uid].unit.of_device < 1:
                    continue
                watched = expected.watched.get(view.gpu.uuid, ())
                busy_at = self._busy_at(self.world.known[uid].held, view.gpu.uuid, watched)
                what = (
                    f"{use.holder.pod}: idle for {use.idle_for_seconds:.0f} s, busy {self.world.t - busy_at:.0f} s ago"
                )
                self.hold("idle for", what, true=use.idle_for_seconds <= self.world.t - busy_at + ASKED_SECONDS)

    def _busy_at(self, held: Held, gpu_uuid: str, watched: tuple[tuple[float, float], ...]) -> float:
        """Return when a holder was last busy for long enough that a sample must have seen it."""
        busy_at = -1e18
        for start, end in watched:
            lasted = 0.0
            for span in self.world.spans(start, end):
                is_busy = span.levels.get(held, 0.0) > BUSY_RATIO and gpu_uuid in span.up
                until = min(span.end, end)
                lasted = lasted + until - max(span.start, start) if is_busy else 0.0
                if lasted > UNSEEN_SECONDS:
                    busy_at = until
        return busy_at

    def page(self, text: str) -> None:
        """Check a page."""
        self.read(text, self.world.t, self.metered * (1 + NEAR_RATIO) + 1e-3)

    def bounds(self, agent: Agent, account_limit: int) -> None:
        """Check that nothing grows without bound."""
        accounts, former = agent.ledgers.sizes
        live = len(self.world.pods) + 20
        self.hold("bounds", f"{accounts} accounts", true=accounts <= account_limit + 2 * live)
        self.hold("bounds", f"{former} ledgers that have ended", true=former <= MOST_FORMER)
