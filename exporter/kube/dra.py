"""Reads DRA ResourceSlices of this node and the claims of its pods, with limits on every size."""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any, NamedTuple

from exporter.attribution.device_ids import GPU_DRA_DRIVER, claim_uid
from exporter.attribution.pod_lifecycle import AllocatedDevice, SliceDevice
from exporter.errors import ApiError
from exporter.kube.api_client import ApiClient, Request
from exporter.kube.list_watch import PATIENCE_SECONDS, ListWatch, Lookups, ObjectKey, mapping_at, text_of
from exporter.model.attribution import Allocations

LOG = logging.getLogger("exporter.kube.dra")

GROUP_PATH = "/apis/resource.k8s.io"
VERSION_SECONDS = 2.0
"""Wait after an object that is not found, before the check of the served version."""
ABSENT_SECONDS = 600.0
"""Interval of checks for DRA in a cluster without it, since the agent does not restart when DRA is enabled."""


VERSIONS = ("v1", "v1beta2", "v1beta1")
"""Supported versions of ``resource.k8s.io``, best first; claims of v1alpha3 (Kubernetes 1.31) differ."""

_DOMAIN = f"{GPU_DRA_DRIVER}/"
_QUANTITY = re.compile(r"\+?(\d{1,30}\.?\d{0,30}|\.\d{1,30})(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?\d{1,2}))?", re.ASCII)
_UNITS = {
    **{f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
    **{
        letter: Decimal(10) ** power
        for letter, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)
    },
}
_MOST_BYTES = 2**63 - 1

Devices = Mapping[str, SliceDevice]
"""Devices by name within one pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One ResourceSlice: a part of one generation of a pool."""

    pool: str
    generation: int
    slice_count: int
    """Number of slices in this generation of the pool."""
    devices: Devices


def parse_slice(item: Mapping[str, Any]) -> Slice | None:
    """Parse one slice; a slice without devices (shared counters) counts too.

    Returns:
        The slice; ``None`` if it is not from NVIDIA's GPU driver.
    """
    spec, pool = mapping_at(item, "spec"), mapping_at(item, "spec", "pool")
    pool_name = text_of(pool.get("name"))
    if not pool_name or spec.get("driver") != GPU_DRA_DRIVER:
        return None
    return Slice(
        pool=pool_name,
        generation=_whole(pool.get("generation"), 0),
        slice_count=_whole(pool.get("resourceSliceCount"), 1),
        devices={text_of(one.get("name")): _device(one) for one in _mappings(spec.get("devices")) if one.get("name")},
    )


def pools_of(slices: Iterable[Slice], before: Mapping[str, Devices]) -> dict[str, Devices]:
    """Combine slices into pools.

    Args:
        slices: All existing slices, of any generation.
        before: Previous result, for times without a complete generation: a driver replaces slices one by one.

    Returns:
        Devices by pool, from its newest complete generation; a pool that was never complete is left out.
    """
    parts: dict[str, dict[int, list[Slice]]] = {}
    for part in slices:
        parts.setdefault(part.pool, {}).setdefault(part.generation, []).append(part)
    pools: dict[str, Devices] = {}
    for pool, generations in parts.items():
        complete = [
            number for number, group in generations.items() if len(group) >= max(one.slice_count for one in group)
        ]
        if complete:
            newest = generations[max(complete)]
            pools[pool] = {name: device for part in newest for name, device in part.devices.items()}
        elif pool in before:
            pools[pool] = before[pool]
    return pools


def uid_of(item: Mapping[str, Any]) -> str:
    """Return the UID of a claim's object, in lower case; empty if it has none."""
    return text_of(mapping_at(item, "metadata").get("uid")).lower()


def allocated_devices(item: Mapping[str, Any]) -> tuple[AllocatedDevice, ...] | None:
    """Return the allocated devices of a ResourceClaim; ``None`` while it is not allocated."""
    allocation = mapping_at(item, "status").get("allocation")
    if not isinstance(allocation, dict):
        return None
    return tuple(
        AllocatedDevice(
            driver=text_of(result.get("driver")),
            pool=text_of(result.get("pool")),
            device=text_of(result.get("device")),
            share_id=text_of(result.get("shareID")) or None,
            admin_access=result.get("adminAccess") is True,
            consumed_memory_bytes=quantity(_named(mapping_at(result, "consumedCapacity"), "memory")),
        )
        for result in _mappings(mapping_at(allocation, "devices").get("results"))
    )


def served_version(group: Mapping[str, Any]) -> str:
    """Return the best supported version of the API group ``resource.k8s.io``; empty without one."""
    served = {text_of(version.get("version")) for version in _mappings(group.get("versions"))}
    return next((version for version in VERSIONS if version in served), "")


def quantity(value: object) -> int | None:
    """Return a Kubernetes quantity (``40Gi``, ``1e9``, ``4096``) in whole units, rounded up; ``None`` if invalid."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value <= _MOST_BYTES else None
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    unit = _UNITS[match[2]] if match[2] else Decimal(10) ** int(match[3] or 0)
    whole = int((Decimal(match[1]) * unit).to_integral_value(ROUND_CEILING))
    return whole if whole <= _MOST_BYTES else None


def _device(device: Mapping[str, Any]) -> SliceDevice:
    basic = device.get("basic")
    body = basic if isinstance(basic, dict) else device
    attributes, memory = mapping_at(body, "attributes"), _named(mapping_at(body, "capacity"), "memory")
    uuid = _attribute(attributes, "uuid")
    return SliceDevice(
        kind=_attribute(attributes, "type") or {"GPU-": "gpu", "MIG-": "mig"}.get(uuid[:4], ""),
        uuid=uuid,
        parent_uuid=_attribute(attributes, "parentUUID"),
        profile=_attribute(attributes, "profile"),
        memory_bytes=quantity(memory.get("value") if isinstance(memory, dict) else memory),
    )


def _attribute(attributes: Mapping[str, Any], name: str) -> str:
    value = mapping_at(_named(attributes, name))
    return next((text_of(value[kind]) for kind in ("string", "version", "int", "bool") if kind in value), "")


def _named(values: Mapping[str, Any], name: str) -> object:
    """Return the value of a qualified name; a name without a domain belongs to the driver."""
    return values.get(name, values.get(_DOMAIN + name))


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


class _Claim(NamedTuple):
    uid: str
    """UID of the claim; empty if the kubelet does not report it."""
    namespace: str
    name: str


class DraReader:
    """Reads slices and claims; reads nothing until the kubelet has listed a claimed GPU.

    Args:
        client: Client of the API.
        node: Name of this node.
        clock: Current Unix time.
        steady: Current seconds of a monotonic clock.
    """

    def __init__(
        self, client: ApiClient, node: str, *, clock: Callable[[], float], steady: Callable[[], float]
    ) -> None:
        self._client = client
        self._steady = steady
        self._seen = asyncio.Event()
        self._asked_at: float | None = None
        self._version = ""
        self._is_absent = False
        self._discovery_problem: ApiError | None = None
        self._discovery_errors: Counter[str] = Counter()
        self._slices: ListWatch[Slice] = ListWatch(
            client=client,
            path=GROUP_PATH,
            query={"fieldSelector": f"spec.nodeName={node},spec.driver={GPU_DRA_DRIVER}"},
            metadata_only=False,
            parse=parse_slice,
            clock=clock,
        )
        self._joined: Mapping[ObjectKey, Slice] | None = None
        """Slices from which ``_devices`` was made."""
        self._pools: dict[str, Devices] = {}
        self._devices: Mapping[tuple[str, str], SliceDevice] | None = None
        self._listed: frozenset[_Claim] = frozenset()
        self._claims: Lookups[_Claim, tuple[str, tuple[AllocatedDevice, ...]]] = Lookups(
            client=client,
            request=lambda claim: Request(
                f"{GROUP_PATH}/{self._version}/namespaces/{claim.namespace}/resourceclaims/{claim.name}"
            ),
            parse=_claim,
            steady=steady,
            renew_seconds=None,
        )

    @property
    def devices(self) -> Mapping[tuple[str, str], SliceDevice] | None:
        """Devices by (pool, name), the same object while nothing changes; ``None`` while no slice is known."""
        if self._slices.items is not self._joined:
            self._joined = self._slices.items
            self._pools = pools_of(self._slices.items.values(), self._pools)
            devices = {(pool, name): device for pool, some in self._pools.items() for name, device in some.items()}
            if devices != self._devices:
                self._devices = devices or None
        return self._devices

    @property
    def claims(self) -> Mapping[str, tuple[AllocatedDevice, ...]]:
        """Devices by UID of the claim; also by ``namespace/name`` if the kubelet does not report the UID."""
        items = self._claims.items
        unnamed = {f"{one.namespace}/{one.name}": devices for one, (_, devices) in items.items() if not one.uid}
        return dict(items.values()) | unnamed

    @property
    def unreadable(self) -> frozenset[str]:
        """UIDs of claims for which callers should not wait any longer."""
        return frozenset(claim.uid for claim in self._listed if claim.uid and self._claims.given_up(claim))

    @property
    def reads_claims(self) -> bool:
        """Whether an unknown claim will still be read."""
        if self._version or self._asked_at is None:
            return True
        return not self._is_absent and self._steady() - self._asked_at < PATIENCE_SECONDS

    @property
    def problems(self) -> list[tuple[str, str]]:
        """(reason, message) of each part that cannot be read."""
        found = [
            (error.reason, f"{error}; for claimed devices only the kubelet's answer counts")
            for error in (self._discovery_problem, self._claims.problem)
            if error
        ]
        if self._slices.failure:
            found.append((self._slices.failure.reason, str(self._slices.failure)))
        return found

    @property
    def errors(self) -> dict[str, Counter[str]]:
        """Counts since the start, by part and reason."""
        return {"dra": self._discovery_errors, "claim": self._claims.errors, "slices": self._slices.errors}

    @property
    def answered(self) -> bool:
        """Whether slices and claims, if needed, were read at least once, or cannot be read now."""
        if not self._version:
            return not self._listed or self._is_absent or self._discovery_problem is not None
        return self._slices.answered and self._claims.answered

    def note(self, allocations: Allocations) -> None:
        """Request the claims that the kubelet lists now, and drop the others."""
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
        self._use(await self._find_version())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._slices.run())
            group.create_task(self._claims.run())
            group.create_task(self._follow_version())

    async def _follow_version(self) -> None:
        """Check the served version after each object that is not found, since an upgraded server may serve another."""
        seen = 0
        while True:
            await asyncio.sleep(VERSION_SECONDS)
            missed = self._slices.errors["not_found"] + self._claims.errors["not_found"]
            if missed == seen:
                continue
            seen = missed
            served = await self._find_version()
            if served != self._version:
                LOG.info("resource.k8s.io: served version changed: before=%s now=%s", self._version, served)
                self._use(served)
                self._claims.retry_absent()

    def _use(self, version: str) -> None:
        self._version = version
        self._slices.path = f"{GROUP_PATH}/{version}/resourceslices"

    async def _find_version(self) -> str:
        failures = 0
        while True:
            if self._asked_at is None:
                self._asked_at = self._steady()
            version, problem = "", None
            try:
                version = served_version(await self._client.get(Request(GROUP_PATH)))
            except ApiError as error:
                problem = None if error.reason == "not_found" else error
            self._discovery_problem, self._is_absent = problem, not version and problem is None
            if version:
                return version
            failures = failures + 1 if problem else 0
            if problem:
                self._discovery_errors[problem.reason] += 1
                await asyncio.sleep(self._client.retry_seconds(problem, failures))
            else:
                await asyncio.sleep(ABSENT_SECONDS * (0.8 + 0.4 * self._client.random()))


def _claim(claim: _Claim, item: Mapping[str, Any]) -> tuple[str, tuple[AllocatedDevice, ...]] | None:
    """Parse a claim; ``None`` for a recreated claim of the same name, with another UID."""
    uid, devices = uid_of(item), allocated_devices(item)
    if devices is None or (claim.uid and claim.uid != uid):
        return None
    return uid, devices
