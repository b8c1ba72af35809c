"""Reads current pods, devices and prices from the live series of a fleet, or from the API of agents."""

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from exporter.cost import agent_client, queries
from exporter.cost.dimensions import EVERYTHING, Filters
from exporter.cost.prometheus import PrometheusClient, SeriesSample, by_labels
from exporter.errors import ExporterError
from exporter.model.snapshot import IDLE_SHOWN_SECONDS

_POD = ("pod_namespace", "pod_name", "container_name")
_DEVICE = ("node", "gpu", "uuid", "gpu_instance", "mig_profile", "model")
_INFO = "gpu_pod_info"
_VALUES = ("activity_ratio", "effective_ratio", "idle_for_seconds", "age_seconds", "memory_used_bytes")
"""Figures of a holder: names of their series without the prefix ``gpu_pod_``."""
_SHARE = "gpu_pod_share_ratio"
_PRICE = "gpu_hourly_price"
_PRICE_LABELS = ("node", "gpu", "currency")
_OF_A_POD = frozenset({"node", "namespace", "kind", "workload", "team", "model", "cluster"})
_MOST_NAMES = 500
_DAY = "1d"

Place = tuple[str, ...]
"""Cluster, device and pod of a series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDevice:
    """A device now, or the part of it that a holder has."""

    cluster: Annotated[str | None, "Null here and below: not known."] = None
    node: Annotated[str, "Name of the node."]
    gpu_uuid: Annotated[str, "Of the physical GPU or instance."]
    gpu_index: Annotated[str, "On its node."]
    gpu_instance: Annotated[str | None, "Of MIG."] = None
    mig_profile: Annotated[str | None, "Of MIG."] = None
    model: Annotated[str | None, "Of the GPU."] = None
    namespace: Annotated[str | None, "Of the pod."] = None
    pod: Annotated[str | None, "Its name."] = None
    container: Annotated[str | None, "Its container."] = None
    gpu_share_ratio: Annotated[float | None, "Its part of the physical GPU."] = None
    activity_ratio: Annotated[float | None, "Now, 0 to 1."] = None
    effective_ratio: Annotated[float | None, "Its effective part; null also where holders share the device."] = None
    idle_for_seconds: Annotated[float | None, "Measured idle time since it was last active."] = None
    age_seconds: Annotated[float | None, "Since it was first seen on the device."] = None
    memory_used_bytes: Annotated[float | None, "On the device."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDocument(LiveDevice):
    """A pod on a device now, or within the last day."""

    namespace: Annotated[str, "Of the pod."]
    pod: Annotated[str, "Its name."]
    gpu_share_ratio: Annotated[float, "Its part of the physical GPU."]
    cost_per_hour: Annotated[list[Mapping[str, Any]], "currency and cost, at the price of now."] = field(
        default_factory=list
    )
    live: Annotated[bool, "False: it has ended."] = True


async def live_pods(client: PrometheusClient, filters: Filters) -> tuple[PodDocument, ...]:
    """Return pods that hold devices now; a filter on namespace, workload or team adds pods of the last day.

    Args:
        client: Client of the server.
        filters: Filters on pods; ``mode`` and ``pool`` are not properties of a pod, and are ignored.

    Returns:
        Pods by cluster, namespace, pod and device; pods that have ended come last.

    Raises:
        PrometheusError: A query failed.
    """
    cluster_label = client.settings.cluster_label
    wanted = filters.only(_OF_A_POD)
    matchers = queries.matchers(wanted, cluster_label)
    labels = (cluster_label, *_DEVICE, *_POD)
    with_ended = bool({"namespace", "workload", "team"} & set(wanted.wanted))
    now = await client.instant(_newest(_INFO, labels, matchers), None)
    before = await client.instant(_newest(_INFO, labels, matchers, _DAY), None) if with_ended else ()
    pods = {**dict.fromkeys(by_labels(before, labels), False), **dict.fromkeys(by_labels(now, labels), True)}
    if not pods:
        return ()
    narrow = _narrow(pods, labels)
    nodes = {place[labels.index("node")] for place in pods}
    of_nodes = queries.matches("node", nodes) if len(nodes) <= _MOST_NAMES else ""
    shares, prices, *values = await asyncio.gather(
        client.instant(_newest(_SHARE, labels, narrow, _DAY if with_ended else ""), None),
        client.instant(_newest(_PRICE, (cluster_label, *_PRICE_LABELS), of_nodes), None),
        *(client.instant(_newest(f"gpu_pod_{name}", labels, narrow), None) for name in _VALUES),
    )
    share_of = by_labels(shares, labels)
    price_of = _prices(prices, cluster_label)
    columns = {name: by_labels(column, labels) for name, column in zip(_VALUES, values, strict=True)}
    found = []
    for place, live in pods.items():
        if place in share_of:  # every holder has a share; without it, the scrape was read in part
            own = dict(zip(labels, place, strict=True))
            price = price_of.get((own[cluster_label], own["node"], own["gpu"]), {}) if live else {}
            measured = {key: column.get(place) for key, column in columns.items()}
            found.append(_pod(own, own[cluster_label], share_of[place], price, {**measured, "live": live}))
    return tuple(sorted(found, key=_order))


def _pod(
    labels: Mapping[str, str], cluster: str, share: float, price: Mapping[str, float], measured: Mapping[str, Any]
) -> PodDocument:
    return PodDocument(
        **_device(labels, cluster),
        namespace=labels["pod_namespace"],
        pod=labels["pod_name"],
        container=labels["container_name"] or None,
        gpu_share_ratio=share,
        **measured,
        cost_per_hour=[{"currency": currency, "cost": hourly * share} for currency, hourly in sorted(price.items())],
    )


def _order(use: PodDocument) -> tuple[bool | str, ...]:
    device = (use.node, use.gpu_index, use.gpu_uuid)
    return (not use.live, use.cluster or "", use.namespace, use.pod, *device)


def _newest(name: str, labels: Iterable[str], matchers: str, lookback: str = "") -> str:
    """Return a query that merges the series of replicas, which are the same."""
    selector = f"{name}{{{matchers}}}"
    return f"max by ({', '.join(labels)}) ({f'last_over_time({selector}[{lookback}])' if lookback else selector})"


def _narrow(pods: Iterable[Place], labels: tuple[str, ...]) -> str:
    """Return a matcher that excludes most of the other pods; the join excludes the rest."""
    at = labels.index("pod_name")
    names = {place[at] for place in pods}
    if len(names) <= _MOST_NAMES:
        return queries.matches("pod_name", names)
    return queries.matches("pod_namespace", {place[labels.index("pod_namespace")] for place in pods})


def _prices(samples: Iterable[SeriesSample], cluster_label: str) -> dict[tuple[str, str, str], dict[str, float]]:
    """Return hourly prices by currency, for each cluster, node and index of a physical GPU."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for sample in samples:
        label = sample.labels.get
        gpu = (label(cluster_label, ""), label("node", ""), label("gpu", ""))
        found.setdefault(gpu, {})[label("currency", "")] = sample.value
    return found


def _device(labels: Mapping[str, str], cluster: str) -> dict[str, Any]:
    """Return the fields of a device from the labels of its series."""
    return {
        "cluster": cluster or None,
        "node": labels.get("node", ""),
        "gpu_uuid": labels.get("uuid", ""),
        "gpu_index": labels.get("gpu", ""),
        **{name: labels.get(name) or None for name in ("gpu_instance", "mig_profile", "model")},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceNow:
    """A row of a price book that applies to GPUs of a model and pool."""

    source: str
    """Price book and row, as ``book:row``."""
    currency: str
    least: float
    most: float
    """Hourly price of a whole GPU; ``least`` and ``most`` differ for a spot price, for example."""


PriceRows = Mapping[tuple[str, str], Sequence[PriceNow]]
"""Price rows by model and pool."""
_FACTS = ("instance_type", "capacity_type")


async def price_rows(client: PrometheusClient, at_seconds: float, filters: Filters) -> PriceRows:
    """Return the price rows of GPUs at a time, by model and pool; empty if no price was recorded within a day.

    Args:
        client: Client of the server.
        at_seconds: Unix time.
        filters: Filters, of which only cluster, node and model apply.

    Raises:
        PrometheusError: A query failed.
    """
    cluster = client.settings.cluster_label
    of_gpus = queries.matchers(filters.only({"cluster", "node", "model"}), cluster)
    of_nodes = queries.matchers(filters.only({"cluster", "node"}), cluster)
    row = ("model", "currency", "price_source")
    gpus = f"({_newest(_PRICE, (cluster, 'node', *row), of_gpus, _DAY)} > 0)"
    facts = f"topk by ({cluster}, node) (1, {_newest('gpu_node_info', (cluster, 'node', *_FACTS), of_nodes, _DAY)})"
    joined = f"{gpus} * on ({cluster}, node) group_left ({', '.join(_FACTS)}) {facts} or on ({cluster}, node) {gpus}"
    by = ", ".join((*row, *_FACTS))
    least, most = await asyncio.gather(
        *(client.instant(f"{name} by ({by}) ({joined})", at_seconds) for name in ("min", "max"))
    )
    lowest, highest = (by_labels(samples, (*row, *_FACTS)) for samples in (least, most))
    found: dict[tuple[str, str], list[PriceNow]] = {}
    for place, high in highest.items():
        model, currency, source, *pool = place
        price = PriceNow(source=source, currency=currency, least=lowest.get(place, high), most=high)
        found.setdefault((model, " ".join(filter(None, pool))), []).append(price)
    return {place: sorted(rows, key=lambda one: one.source) for place, rows in found.items()}


_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow(LiveDevice):
    """A holder of a device, or a device without a holder. ``None``: unknown, not measured or without a price."""

    state: str
    """``allocated``, ``unallocated`` or ``unknown``; for a device that is not up, the state of the device."""
    owner_kind: str | None = None
    owner_name: str | None = None
    team: str | None = None
    unknown_reason: str | None = None
    cost_per_hour: Mapping[str, float] = field(default_factory=dict)
    """Hourly cost by currency."""

    @property
    def key(self) -> tuple[str | None, ...]:
        """Identity of the row."""
        return self.cluster, self.node, self.gpu_uuid, self.namespace, self.pod, self.container

    @property
    def is_idle(self) -> bool:
        """Whether a holder has been idle for long enough to be marked."""
        return self.idle_for_seconds is not None and self.idle_for_seconds >= IDLE_SHOWN_SECONDS

    @property
    def waste(self) -> tuple[float, float]:
        """Money of the idle time without currency conversion, then its GPU-seconds; only for sorting."""
        idle = self.idle_for_seconds or 0.0
        return idle * sum(self.cost_per_hour.values()), idle * (self.gpu_share_ratio or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """All rows at one moment."""

    rows: tuple[LiveRow, ...]
    simulated: bool = False
    problems: tuple[str, ...] = ()
    """Problems, one line each: the missing data and the cause."""


def picture_of(document: Mapping[str, Any], where: str) -> Picture:
    """Return the rows of an agent's answer to ``/api/v1/devices``; ``where`` names the agent in problems.

    Raises:
        ExporterError: The answer has another form.
    """
    with agent_client.understood(where, "an agent's"):
        rows = tuple(row for device in document["devices"] for row in _rows_of(device, str(document["node"])))
        reasons = [] if document["ready"] else [str(one).replace("_", " ") for one in document["not_ready_reasons"]]
        attribution = document["attribution"]["problem"]
    problems = [*(f"not ready: {reason}" for reason in reasons), *([str(attribution)] if attribution else [])]
    return Picture(
        rows=rows, simulated=bool(document.get("simulated")), problems=tuple(f"{where}: {one}" for one in problems)
    )


def _rows_of(device: Mapping[str, Any], node: str) -> Iterator[LiveRow]:
    up, price = device["state"] == "up", _number(device["gpu_price_per_hour"])
    instance = device["gpu_instance_id"]
    bare = LiveRow(
        node=node,
        gpu_index=str(device["gpu_index"]),
        gpu_uuid=device["uuid"],
        model=device["model"],
        gpu_instance=None if instance is None else str(instance),
        mig_profile=device["mig_profile"],
        state=str(device["allocation"]) if up else device["state"],
        gpu_share_ratio=_number(device.get("gpu_share_ratio")),
        activity_ratio=_number(device["activity_ratio"]),
        effective_ratio=_number(device.get("effective_ratio")),
        unknown_reason=device["activity_unknown_reason"] or device["state_reason"],
        memory_used_bytes=_number(device["memory_used_bytes"]),
    )

    def cost(share: float | None) -> Mapping[str, float]:
        return {} if price is None or share is None else {device["price_currency"]: price * share}

    for one in device["holders"]:
        yield replace(
            bare,
            **_holder(one),
            unknown_reason=bare.unknown_reason if one["activity_ratio"] is None else None,
            cost_per_hour=cost(one["gpu_share_ratio"]),
        )
    if not device["holders"] and (device["allocation"] is not None or not up):
        yield replace(bare, cost_per_hour=cost(bare.gpu_share_ratio))


_NAMES_OF_A_HOLDER = ("namespace", "pod", "container", "owner_kind", "owner_name", "team")
_NUMBERS_OF_A_HOLDER = ("gpu_share_ratio", *_VALUES)


def _holder(one: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {key: _number(one.get(key)) for key in _NUMBERS_OF_A_HOLDER}
    return {key: one[key] for key in _NAMES_OF_A_HOLDER} | numbers


def _number(value: Any) -> float | None:  # noqa: ANN401 - comes from JSON, is checked there
    return None if value is None else agent_client.number(value)


async def agent_picture(client: agent_client.AgentClient, where: str) -> Picture:
    """Return the rows of one agent; problems name it as ``where``.

    Raises:
        ExporterError: The agent does not answer, or the address is not an agent.
    """
    return picture_of(await asyncio.to_thread(client.fetch, agent_client.DEVICES, _TIMEOUT_SECONDS), where)


_OWNER = ("pod_namespace", "pod_name", "workload_kind", "workload_name", "team")
_OF_A_DEVICE = ("gpu_share_ratio", "gpu_activity_ratio", "gpu_effective_ratio")
_NAMED = ("__name__", "node", "uuid")


async def fleet_picture(client: PrometheusClient) -> Picture:
    """Return the rows of a fleet from its live series.

    Raises:
        PrometheusError: A query failed.
        ExporterError: The server has no such series.
    """
    cluster = client.settings.cluster_label

    def newest(selector: str, *labels: str) -> Awaitable[Sequence[SeriesSample]]:
        return client.instant(f"max by ({', '.join((cluster, *labels))}) ({selector})", None)

    unheld = 'gpu_allocation_state{state!="allocated"} == 1'
    pods, owners, states, values, prices, simulated = await asyncio.gather(
        live_pods(client, EVERYTHING),
        newest(_INFO, *_OWNER),
        newest(unheld, *_DEVICE, "state"),
        newest(f'{{__name__=~"{"|".join(_OF_A_DEVICE)}"}} and on ({cluster}, node, uuid) ({unheld})', *_NAMED),
        newest(_PRICE, *_PRICE_LABELS),
        client.instant("max(gpu_exporter_simulated)", None),
    )
    pod_labels = (cluster, "pod_namespace", "pod_name")
    owner_of = {tuple(one.labels.get(name, "") for name in pod_labels): one.labels for one in owners}
    rows = [_of_pod(pod, owner_of.get((pod.cluster or "", pod.namespace, pod.pod), {})) for pod in pods]
    price_of = _prices(prices, cluster)
    value_of = by_labels(values, (*_NAMED, cluster))
    rows += [_of_state(one.labels, one.labels.get(cluster, ""), price_of, value_of) for one in states]
    if not rows:
        raise ExporterError(
            f"Prometheus has no series {_INFO} or gpu_allocation_state of the last minutes; does it scrape the agents?"
            " see docs/install.md"
        )
    return Picture(rows=tuple(rows), simulated=bool(simulated and simulated[0].value))


_SAME = tuple(one.name for one in fields(LiveDevice))


def _of_pod(pod: PodDocument, owner: Mapping[str, str]) -> LiveRow:
    return LiveRow(
        **{name: getattr(pod, name) for name in _SAME},
        state="allocated",
        owner_kind=owner.get("workload_kind") or None,
        owner_name=owner.get("workload_name") or None,
        team=owner.get("team") or None,
        cost_per_hour={one["currency"]: one["cost"] for one in pod.cost_per_hour},
    )


def _of_state(
    labels: Mapping[str, str],
    cluster: str,
    price_of: Mapping[tuple[str, str, str], Mapping[str, float]],
    value_of: Mapping[Place, float],
) -> LiveRow:
    node, gpu, uuid = (labels.get(name, "") for name in ("node", "gpu", "uuid"))
    share, activity, effective = (value_of.get((name, node, uuid, cluster)) for name in _OF_A_DEVICE)
    if not labels.get("gpu_instance"):
        share = 1.0
    price = {} if share is None else price_of.get((cluster, node, gpu), {})
    return LiveRow(
        **_device(labels, cluster),
        state=labels.get("state", "unknown"),
        gpu_share_ratio=share,
        activity_ratio=activity,
        effective_ratio=effective,
        cost_per_hour={currency: hourly * (share or 0.0) for currency, hourly in price.items()},
    )
