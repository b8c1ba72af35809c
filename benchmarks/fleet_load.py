"""What a fleet of agents asks of the Kubernetes API, by arithmetic."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import kube_objects


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """How many agents there are, what is on their nodes, and how often each asks."""

    nodes: int = 5000
    pods_per_node: int = 110
    gpu_namespaces_per_node: int = 3
    pod_starts_per_hour: float = 50_000.0
    """In the whole fleet."""
    events_per_pod: int = 8
    """From scheduling to deletion."""
    watch_seconds: tuple[float, float] = (240.0, 480.0)
    bookmark_seconds: float = 60.0
    node_seconds: float = 600.0
    namespace_seconds: float = 600.0
    start_jitter_seconds: float = 60.0
    poll_seconds: float = 15.0
    """Of an exporter that lists its node's pods instead of watching them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of what is answered, without compression."""

    pod_full: int
    pod_metadata: int
    bookmark: int
    node: int
    namespace: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of the whole fleet; requests and bytes each second unless the name says otherwise."""

    streams: int
    start_bytes: float
    start_bytes_full: float
    start_requests: float
    start_bytes_per_second: float
    renewals: float
    node_gets: float
    namespace_gets: float
    events: float
    steady_requests: float
    steady_bytes: float
    poll_requests: float
    poll_bytes: float


def sizes() -> Sizes:
    """Measure the objects of ``kube_objects``."""
    whole = kube_objects.pod(1)
    metadata = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": whole["metadata"]}
    mark: Mapping[str, Any] = {"resourceVersion": "123456789", "creationTimestamp": None}
    return Sizes(
        pod_full=_bytes(whole),
        pod_metadata=_bytes(metadata),
        bookmark=_bytes({"type": "BOOKMARK", "object": {**metadata, "metadata": mark}}),
        node=_bytes(kube_objects.node()),
        namespace=_bytes(kube_objects.namespace(1)),
    )


def load(fleet: Fleet, size: Sizes) -> Load:
    """Compute what the fleet asks for; every agent has one watch, renewed at a random age."""
    renewals = fleet.nodes / (sum(fleet.watch_seconds) / 2)
    node_gets = fleet.nodes / fleet.node_seconds
    namespace_gets = fleet.nodes * fleet.gpu_namespaces_per_node / fleet.namespace_seconds
    events = fleet.pod_starts_per_hour * fleet.events_per_pod / 3600
    start = fleet.nodes * fleet.pods_per_node * size.pod_metadata
    # A list and a watch of pods, the node, and the namespaces that hold GPUs.
    at_start = fleet.nodes * (3 + fleet.gpu_namespaces_per_node)
    polls = fleet.nodes / fleet.poll_seconds
    return Load(
        streams=fleet.nodes,
        start_bytes=start,
        start_bytes_full=fleet.nodes * fleet.pods_per_node * size.pod_full,
        start_requests=at_start / fleet.start_jitter_seconds,
        start_bytes_per_second=start / fleet.start_jitter_seconds,
        renewals=renewals,
        node_gets=node_gets,
        namespace_gets=namespace_gets,
        events=events,
        steady_requests=renewals + node_gets + namespace_gets,
        steady_bytes=events * size.pod_metadata
        + fleet.nodes / fleet.bookmark_seconds * size.bookmark
        + node_gets * size.node
        + namespace_gets * size.namespace,
        poll_requests=polls,
        poll_bytes=polls * fleet.pods_per_node * size.pod_metadata,
    )


def table(fleet: Fleet, size: Sizes) -> str:
    """Write the load as a Markdown table."""
    one = load(fleet, size)
    mega = 1e6
    rows = (
        ("open streams, one connection each", f"{one.streams:,}"),
        ("start: bytes of all lists, metadata form", f"{one.start_bytes / 1e9:.1f} GB"),
        ("start: the same in full", f"{one.start_bytes_full / 1e9:.1f} GB"),
        (f"start: requests, spread over {fleet.start_jitter_seconds:g} s", f"{one.start_requests:.0f}/s"),
        (
            f"start: bytes, spread over {fleet.start_jitter_seconds:g} s",
            f"{one.start_bytes_per_second / mega:.0f} MB/s",
        ),
        ("steady: watches renewed", f"{one.renewals:.1f}/s"),
        ("steady: nodes read again", f"{one.node_gets:.1f}/s"),
        ("steady: namespaces read again", f"{one.namespace_gets:.1f}/s"),
        ("steady: all requests", f"{one.steady_requests:.1f}/s"),
        ("steady: events", f"{one.events:.0f}/s"),
        ("steady: bytes", f"{one.steady_bytes / mega:.2f} MB/s"),
        (f"instead, a list every {fleet.poll_seconds:g} s: requests", f"{one.poll_requests:.0f}/s"),
        (f"instead, a list every {fleet.poll_seconds:g} s: bytes", f"{one.poll_bytes / mega:.0f} MB/s"),
    )
    head = f"| {fleet.nodes:,} nodes with {fleet.pods_per_node} pods each | computed |\n|---|---:|"
    return "\n".join((head, *(f"| {name} | {value} |" for name, value in rows)))


def _bytes(shown: Mapping[str, Any]) -> int:
    return len(json.dumps(shown, separators=(",", ":")))
