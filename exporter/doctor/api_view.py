"""Lets the agent's own reader of the Kubernetes API run for a moment, and keeps what it has learned."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from exporter.attribution.device_ids import GPU_DRA_DRIVER
from exporter.attribution.dra import claim_uid
from exporter.attribution.evidence import Evidence
from exporter.attribution.metadata import Metadata, MetadataSettings
from exporter.attribution.podresources import own_pod
from exporter.config import AgentConfig
from exporter.model import Allocations, NodeFacts, PodFacts

_PodName = tuple[str, str]

_LOOKS = 160
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiView:
    """What the API says of this node, as the agent would have it after a moment."""

    evidence: Evidence
    facts: Callable[[str, str], PodFacts | None]
    node_facts: NodeFacts | None
    problem: str


async def read(
    config: AgentConfig,
    allocations: Allocations | None,
    holders_of: Callable[[Evidence], Collection[_PodName]],
    clock: Callable[[], float],
) -> ApiView:
    """Let the agent's own reader run until it knows what concerns this node's holders, or for some seconds.

    Args:
        config: Of the agent.
        allocations: The kubelet's answer.
        holders_of: Namespace and name of the pods that hold devices by what is known.
        clock: Unix time.
    """
    settings = MetadataSettings(
        node=config.node_name,
        kubeconfig=config.kubeconfig,
        team_keys=config.team_keys,
        cost_labels=config.cost_labels,
        namespace_teams=config.namespace_teams,
        pod_labels=config.pod_labels,
        pod_annotations=config.pod_annotations,
        reservation_namespaces=config.reservation_namespaces,
        own_pod=own_pod(),
    )
    metadata = Metadata(settings, clock=clock, random=random.random)
    task = asyncio.ensure_future(metadata.run())
    try:
        if allocations:
            metadata.note(allocations, clock())
        for _ in range(_LOOKS):
            if task.done() or _is_settled(metadata, allocations, holders_of, clock()):
                break
            await asyncio.sleep(_LOOK_SECONDS)
        evidence = metadata.evidence(clock())
        facts = {name: metadata.facts(*name) for name in holders_of(evidence)}
        return ApiView(
            evidence=evidence,
            facts=lambda namespace, pod: facts.get((namespace, pod)),
            node_facts=metadata.node_facts,
            problem=metadata.problem,
        )
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _is_settled(
    metadata: Metadata,
    allocations: Allocations | None,
    holders_of: Callable[[Evidence], Collection[_PodName]],
    now: float,
) -> bool:
    evidence = metadata.evidence(now)
    if evidence.pods is None or (metadata.node_facts is None and not metadata.problem):
        return False
    containers = allocations.containers if allocations else ()
    read = evidence.claims.keys() | evidence.unreadable_claims
    claims = [one for of in containers for one in of.claims if one.driver == GPU_DRA_DRIVER]
    uids = {uid for one in claims if (uid := claim_uid(one))}
    if not uids <= read or (claims and evidence.devices is None):
        return bool(metadata.problem)
    known = [metadata.facts(*name) for name in holders_of(evidence) if name in evidence.pods]  # asks for each of them
    return None not in known
