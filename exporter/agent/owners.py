"""Resolves the owner of each pod once and keeps it until the pod ends."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from exporter.accounting.gpu_split import Slot
from exporter.accounting.owner_figures import owners_view
from exporter.accounting.state_file import StateFile
from exporter.accounting.windows import Windows
from exporter.errors import StateError
from exporter.model.attribution import Holder, Owner, PodFacts, is_other_pod
from exporter.model.ledger import OwnersView, Portion, Price
from exporter.model.snapshot import DeviceView

if TYPE_CHECKING:
    from exporter.attribution.tenants import TenantSource
    from exporter.kube.metadata import Metadata

PATIENCE_SECONDS = 600.0
"""Maximum wait for the owner of a pod; after it, the pod itself is the owner of its time."""

_PodName = tuple[str, str]
_Pod = tuple[str, str, str]
"""Namespace, name and UID; the UID is empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pin:
    owner: Owner
    pod_uid: str | None


@dataclass(slots=True)
class Owners:
    """Resolves the owners of pods; an owner is fixed when it is first known.

    A changed label of a running pod does not change its owner, because the seconds would be split between two owners.
    Without a ``tenancy``, the namespace is the owner. The time of a pod before its owner is known is charged to a
    provisional owner, which ``settled`` resolves. After ``PATIENCE_SECONDS`` the owner is ``Pod/<name>``.
    """

    tenancy: "Metadata | TenantSource | None" = None
    _pins: dict[_PodName, _Pin] = field(default_factory=dict)
    _waiting_since: dict[_Pod, float] = field(default_factory=dict)
    _given_up: set[_Pod] = field(default_factory=set)
    _outlived: dict[_PodName, str] = field(default_factory=dict)
    """UID of the former pod by name, if the API still reports only that pod while another one runs."""
    _held: set[_PodName] = field(default_factory=set)
    """Pods that have held a device since ``_swept_at``."""
    _swept_at: float | None = None

    def facts(self, holder: Holder) -> PodFacts | None:
        """Return the known facts of a holder's pod, with the charged owner."""
        if self.tenancy is None:
            return None
        name = (holder.namespace, holder.pod)
        found = self.tenancy.facts(*name)
        if found is not None and found.pod_uid and holder.pod_uid:
            found = self._of_pod(name, found, holder.pod_uid)
        pin = self._pins.get(name)
        if pin is not None and is_other_pod(pin.pod_uid, holder.pod_uid):
            # Another pod with the same name: the owner of the first pod must not be charged for its time.
            del self._pins[name]
            pin = None
        if pin is None:
            if found is not None:
                self._pins[name] = _Pin(owner=found.owner, pod_uid=holder.pod_uid)
            return found
        if pin.pod_uid is None and holder.pod_uid is not None:
            self._pins[name] = replace(pin, pod_uid=holder.pod_uid)
        if found is None:
            return PodFacts(owner=pin.owner)
        return found if found.owner == pin.owner else replace(found, owner=pin.owner)

    def _of_pod(self, name: _PodName, found: PodFacts, pod_uid: str) -> PodFacts | None:
        """Return the facts if they belong to this pod; without an answer of the API, they are of an earlier pod."""
        if found.pod_uid == pod_uid:
            self._outlived.pop(name, None)
            return found
        self._outlived[name] = found.pod_uid
        pin = self._pins.get(name)
        if pin is not None and pin.pod_uid is None:  # from the former pod, before its UID was known
            del self._pins[name]
        return None

    def owner_of(self, holder: Holder) -> Owner:
        """Return the owner that a holder is charged to."""
        if self.tenancy is None:
            return Owner(namespace=holder.namespace)
        facts = self.facts(holder)
        if facts is not None:
            return facts.owner
        itself = Owner(namespace=holder.namespace, kind="Pod", name=holder.pod)
        uid = holder.pod_uid or ""
        is_given_up = (holder.namespace, holder.pod, uid) in self._given_up
        return itself if is_given_up else replace(itself, provisional=True, pod_uid=uid)

    def settled(self, provisional: Owner, steady: float) -> Owner:
        """Return the actual owner for a provisional owner, or the provisional owner during the wait.

        Args:
            provisional: Result of ``owner_of``, in this process or the previous one.
            steady: Seconds of the monotonic clock.
        """
        name = (provisional.namespace, provisional.name)
        uid = provisional.pod_uid
        pod = (*name, uid)
        pin = self._pins.get(name)
        if pin and is_other_pod(pin.pod_uid, uid):
            pin = None
        facts = self.tenancy.facts(*name) if self.tenancy else None
        if facts and facts.pod_uid and (facts.pod_uid != uid if uid else facts.pod_uid == self._outlived.get(name)):
            facts = None
        owner = pin.owner if pin else facts.owner if facts else None
        waited = steady - self._waiting_since.setdefault(pod, steady)
        if owner is None and self.tenancy is not None and pod not in self._given_up and waited < PATIENCE_SECONDS:
            return provisional
        del self._waiting_since[pod]
        if owner is None:
            self._given_up.add(pod)
        return owner or replace(provisional, provisional=False, pod_uid="")

    def forget(self, held: Iterable[_PodName], steady: float) -> None:
        """Drop pods that have held nothing for ``PATIENCE_SECONDS``, at most twice that time later.

        Args:
            held: Namespace and name of each pod that holds a device now; call this only if the holders are known.
            steady: Seconds of the monotonic clock.
        """
        self._held.update(held)
        if self._swept_at is None:
            self._swept_at = steady
        if steady - self._swept_at < PATIENCE_SECONDS:
            return
        self._pins = {name: pin for name, pin in self._pins.items() if name in self._held}
        self._outlived = {name: uid for name, uid in self._outlived.items() if name in self._held}
        self._given_up = {pod for pod in self._given_up if pod[:2] in self._held}
        self._held, self._swept_at = set(), steady

    def restore(self, slots: Iterable[Slot]) -> None:
        """Restore the owners that were charged when the last process ended.

        Owners that may be a fallback are looked up again: a namespace alone, or a pod itself without a team and cost
        labels.
        """
        for slot in slots:
            owner = slot.account.owner
            is_known = owner.kind != "Pod" or ((owner.team or owner.cost_labels) and not owner.provisional)
            if slot.pod and owner.name and is_known:
                self._pins[slot.namespace, slot.pod] = _Pin(owner=owner, pod_uid=slot.pod_uid)


LOG = logging.getLogger("exporter.agent")

FILE_NAME = "windows.json"
SAVE_SECONDS = 60.0
"""Time between two saves. A crash loses at most this time, so the shortest window stays covered."""
JUDGE_SECONDS = 15.0
"""Time for which figures are reused while the holders do not change; equals the shortest usual scrape interval."""


@dataclass(slots=True, kw_only=True)
class OwnerWindows:
    """Activity windows of one node, and the figures from them. A loss of windows does not affect the ledger."""

    file: StateFile | None = None
    boot_id: str = ""
    """Boot id of the machine; windows of another boot are not restored."""
    simulated: bool = False
    pace: float = 1.0
    """Window seconds per real second; differs from 1 only on a simulated node."""
    judge_seconds: float = JUDGE_SECONDS
    windows: Windows = field(default_factory=Windows)
    _view: OwnersView | None = None
    _held: list[Holder] = field(default_factory=list)
    """The holders for which ``_view`` was computed."""
    _judge_at: float = 0.0
    _save_at: float = 0.0
    _problem: str = ""

    def restore(self, steady: float, errors: Counter[tuple[str, str]]) -> None:
        """Continue from the file, if it is from this boot; a damaged file is set aside, logged and counted.

        Args:
            steady: Current seconds of the monotonic clock.
            errors: Counts by (part, reason).
        """
        try:
            windows = self.file.parsed(lambda state: self._windows_of(state, steady)) if self.file else None
        except StateError as error:
            self._failed(error, errors)
        else:
            self.windows = windows or self.windows

    def _windows_of(self, state: Mapping[str, Any], steady: float) -> Windows | None:
        is_mine = bool(self.boot_id) and state.get("boot_id") == self.boot_id
        if not is_mine or state.get("simulated") is not self.simulated:
            return None
        return Windows.load(state["windows"], steady * self.pace)

    def add(self, portions: Sequence[Portion], steady: float) -> None:
        """Add the portions of one sample that ended at ``steady``, in seconds of the monotonic clock."""
        if self.pace != 1:
            portions = [portion.part(self.pace) for portion in portions]
        self.windows.add(portions, steady * self.pace)

    def view(
        self,
        views: Sequence[DeviceView],
        prices: Mapping[str, Price],
        free_shares: Mapping[str, float],
        *,
        now: float,
        steady: float,
    ) -> OwnersView:
        """Return the holdings and use of owners; computed after changes of holders and every ``judge_seconds``.

        Args:
            views: GPUs and MIG instances with their holders.
            prices: Current price by UUID of the physical GPU.
            free_shares: Result of ``Meter.free_shares``.
            now: Unix time.
            steady: Seconds of the monotonic clock.
        """
        held = [use.holder for view in views for use in view.pods]
        if self._view is None or steady >= self._judge_at or held != self._held:
            if self.pace != 1:
                views = [_clocks_at_pace(view, self.pace) for view in views]
            self._view = owners_view(views, self.windows.at(steady * self.pace), prices, free_shares, now)
            self._held, self._judge_at = held, steady + self.judge_seconds / self.pace
        return self._view

    def begin_save(self, steady: float, *, last: bool) -> tuple[StateFile, Mapping[str, Any]] | None:
        """Return the file and the windows to save; ``None`` if no save is due, except at the end (``last``)."""
        if self.file is None or (steady < self._save_at and not last):
            return None
        self._save_at = steady + SAVE_SECONDS
        return self.file, {"boot_id": self.boot_id, "simulated": self.simulated, "windows": self.windows.dump()}

    def end_save(self, error: StateError | None, errors: Counter[tuple[str, str]]) -> None:
        """Log and count a failed save."""
        if error is not None:
            self._failed(error, errors)
        elif self._problem and self.file:
            self._problem = ""
            LOG.info("activity windows are saved again: file=%s", self.file.path)

    def _failed(self, error: StateError, errors: Counter[tuple[str, str]]) -> None:
        errors["windows", error.reason] += 1
        if str(error) != self._problem:
            LOG.warning("%s", error)
        self._problem = str(error)


def _clocks_at_pace(view: DeviceView, pace: float) -> DeviceView:
    """Return a simulated device with ages and idle times that match its windows."""
    pods = tuple(
        replace(
            use,
            age_seconds=pace * use.age_seconds,
            idle_for_seconds=None if use.idle_for_seconds is None else pace * use.idle_for_seconds,
        )
        for use in view.pods
    )
    return replace(view, pods=pods)
