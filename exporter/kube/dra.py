"""Reads DRA ResourceSlices of this node and the claims of its pods."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from exporter.attribution.device_ids import GPU_DRA_DRIVER, claim_uid
from exporter.attribution.pod_lifecycle import AllocatedDevice, SliceDevice
from exporter.errors import ApiError
from exporter.kube import objects
from exporter.kube.api_client import ApiClient, Request
from exporter.kube.list_watch import PATIENCE_SECONDS, ListWatch, Lookups
from exporter.model import Allocations

LOG = logging.getLogger("exporter.kube.dra")

GROUP_PATH = "/apis/resource.k8s.io"
VERSION_SECONDS = 2.0
"""How soon a request that was not found leads to the question which version is served."""
ABSENT_SECONDS = 600.0
"""A cluster without DRA is asked again, for who changes that changes no agent."""


class _Claim(NamedTuple):
    uid: str
    """Empty where the kubelet does not tell."""
    namespace: str
    name: str


class _Read(NamedTuple):
    uid: str
    devices: tuple[AllocatedDevice, ...]


class DraReader:
    """Reads nothing until the kubelet has listed a claimed GPU.

    Args:
        client: Of the API.
        node: Name of this node.
        clock: Unix time now.
        steady: Seconds of a time that nobody sets.
        random: 0..1.
    """

    def __init__(
        self,
        client: ApiClient,
        node: str,
        *,
        clock: Callable[[], float],
        steady: Callable[[], float],
        random: Callable[[], float],
    ) -> None:
        self._client = client
        self._node = node
        self._clock = clock
        self._steady = steady
        self._random = random
        self._seen = asyncio.Event()
        self._asked_at: float | None = None
        self._version = ""
        self._is_absent = False
        self._discovery_problem: ApiError | None = None
        self._discovery_errors: Counter[str] = Counter()
        self._slices: ListWatch[objects.Slice] | None = None
        self._slices_version = -1
        self._pools: dict[str, objects.Devices] = {}
        self._devices: Mapping[tuple[str, str], SliceDevice] | None = None
        self._listed: frozenset[_Claim] = frozenset()
        self._claims: Lookups[_Claim, _Read] = Lookups(
            client,
            request=self._claim_request,
            parse=_claim,
            steady=steady,
            random=random,
            renew_seconds=None,
        )
        self._items: Mapping[_Claim, _Read] = {}
        self._by_uid: Mapping[str, tuple[AllocatedDevice, ...]] = {}

    @property
    def devices(self) -> Mapping[tuple[str, str], SliceDevice] | None:
        """Devices by (pool, name), the same object while nothing changes; ``None`` while no slice is known."""
        if self._slices is not None and self._slices.version != self._slices_version:
            self._slices_version = self._slices.version
            self._pools = objects.pools_of(self._slices.items.values(), self._pools)
            devices = {(pool, name): device for pool, some in self._pools.items() for name, device in some.items()}
            if devices != self._devices:
                self._devices = devices or None
        return self._devices

    @property
    def claims(self) -> Mapping[str, tuple[AllocatedDevice, ...]]:
        """Devices of claims by their UID, the same object while nothing changes.

        Of claims whose UID the kubelet does not tell they are there by ``namespace/name`` too.
        """
        if self._items is not self._claims.items:
            self._items = self._claims.items
            self._by_uid = {read.uid: read.devices for read in self._items.values()}
            self._by_uid |= {
                f"{claim.namespace}/{claim.name}": read.devices for claim, read in self._items.items() if not claim.uid
            }
        return self._by_uid

    @property
    def unreadable(self) -> frozenset[str]:
        """UIDs of claims for which nothing should wait any more."""
        return frozenset(claim.uid for claim in self._listed if claim.uid and self._claims.given_up(claim))

    @property
    def reads_claims(self) -> bool:
        """Whether a claim of which nothing is known yet will still be read."""
        if self._version or self._asked_at is None:
            return True
        return not self._is_absent and self._steady() - self._asked_at < PATIENCE_SECONDS

    @property
    def problems(self) -> tuple[tuple[str, str], ...]:
        """(reason, one line) of each part that cannot be had."""
        found = [
            (error.reason, f"{error}; claimed devices go by the kubelet's word")
            for error in (self._discovery_problem, self._claims.problem)
            if error
        ]
        if self._slices is not None and self._slices.problem:
            found.append(("", self._slices.problem))
        return tuple(found)

    @property
    def errors(self) -> Mapping[str, int]:
        """Counts since the start by reason, with the part before it."""
        slices: Mapping[str, int] = self._slices.errors if self._slices is not None else {}
        parts = {"dra": self._discovery_errors, "claim": self._claims.errors, "slices": slices}
        return {f"{part}_{reason}": count for part, counts in parts.items() for reason, count in counts.items()}

    def note(self, allocations: Allocations) -> None:
        """Have the claims read that the kubelet lists now, and forget the others."""
        listed = frozenset(
            _Claim(claim_uid(claim) or "", claim.claim_namespace, claim.claim_name)
            for container in allocations.containers
            for claim in container.claims
            if claim.driver == GPU_DRA_DRIVER and claim.claim_namespace and claim.claim_name
        )
        if listed != self._listed:
            self._listed = listed
            self._claims.keep(listed)
        if listed:
            self._seen.set()

    async def run(self) -> None:
        """Wait for the first claim, then follow slices and read claims until cancelled."""
        await self._seen.wait()
        self._version = await self._find_version()
        self._slices_version = -1
        self._slices = ListWatch(
            self._client,
            path=self._slices_path(),
            query={"fieldSelector": f"spec.nodeName={self._node},spec.driver={GPU_DRA_DRIVER}"},
            metadata_only=False,
            parse=objects.parse_slice,
            clock=self._clock,
            random=self._random,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._slices.run())
            group.create_task(self._claims.run())
            group.create_task(self._follow_version(self._slices))

    async def _follow_version(self, slices: ListWatch[objects.Slice]) -> None:
        """Find the served version again whenever something is not found: an upgraded server may serve another one."""
        seen = 0
        while True:
            await asyncio.sleep(VERSION_SECONDS)
            missed = slices.errors.get("not_found", 0) + self._claims.errors["not_found"]
            if missed == seen:
                continue
            seen = missed
            served = await self._find_version()
            if served != self._version:
                LOG.info("resource.k8s.io: served version changed: before=%s now=%s", self._version, served)
                self._version = served
                slices.path = self._slices_path()
                self._claims.retry_absent()

    def _slices_path(self) -> str:
        return f"{GROUP_PATH}/{self._version}/resourceslices"

    async def _find_version(self) -> str:
        failures = 0
        while True:
            if self._asked_at is None:
                self._asked_at = self._steady()
            wait_seconds = ABSENT_SECONDS * (0.8 + 0.4 * self._random())
            try:
                version = objects.served_version(await self._client.get(GROUP_PATH))
            except ApiError as error:
                self._is_absent = error.reason == "not_found"
                self._discovery_problem = None if self._is_absent else error
                if not self._is_absent:
                    self._discovery_errors[error.reason] += 1
                    failures += 1
                    wait_seconds = self._client.retry_seconds(error, failures)
            else:
                self._is_absent, self._discovery_problem, failures = not version, None, 0
                if version:
                    return version
            await asyncio.sleep(wait_seconds)

    def _claim_request(self, claim: _Claim) -> Request:
        return Request(f"{GROUP_PATH}/{self._version}/namespaces/{claim.namespace}/resourceclaims/{claim.name}")


def _claim(claim: _Claim, item: Mapping[str, Any]) -> _Read | None:
    """Read a claim; one of the same name that was made since is another, whose devices are not these."""
    uid, devices = objects.claim_uid(item), objects.allocated_devices(item)
    if devices is None or (claim.uid and claim.uid != uid):
        return None
    return _Read(uid, devices)
