"""The Kubernetes API in virtual time: real objects, owner rules and endings behind a watch that is made here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from virtual_world import Pod, World

from exporter.attribution.owner_rules import OwnerRules, facts_of
from exporter.attribution.pod_lifecycle import Endings, Evidence, PodName
from exporter.kube.metadata import parse_pod
from exporter.model import Allocations, NodeFacts, PodFacts, PodMetadata

RULES = OwnerRules(team_keys=("team",))


@dataclass(slots=True)
class Followed:
    """The API's pods as a watch has them."""

    items: Mapping[PodName, PodMetadata] = field(default_factory=dict)
    known: bool = False
    at_seconds: float | None = None
    problem: str = ""


@dataclass(slots=True)
class Api:
    """What the Kubernetes API says: real objects, owner rules and endings behind a watch that is made here."""

    world: World
    late_seconds: float = 1.0
    is_down: bool = False
    errors: dict[str, int] = field(default_factory=dict)
    remark: str = ""
    names_other_node: bool = False
    node_facts: NodeFacts | None = None
    first_seen: dict[str, float] = field(default_factory=dict)
    _followed: Followed = field(default_factory=Followed)
    _endings: Endings = field(default_factory=Endings)
    _evidence: Evidence = field(default_factory=Evidence)
    _facts: dict[PodName, tuple[PodMetadata, PodFacts]] = field(default_factory=dict)
    _steady: float = 0.0
    _last_now: float | None = None

    def follow(self, wall: float) -> None:
        """Bring the watch up to date, as far as the API is there."""
        for pod in self.world.pods.values():
            self.first_seen.setdefault(pod.uid, self.world.t)
        if self.world.forgets:
            self.first_seen = {uid: at for uid, at in self.first_seen.items() if uid in self.world.known}
            self._facts = {name: kept for name, kept in self._facts.items() if kept[0].uid in self.world.known}
        if self.is_down:
            self._followed.problem = "api: refused"
            return
        items: dict[PodName, PodMetadata] = {}
        for pod in self.world.pods.values():
            if self.world.t - self.first_seen[pod.uid] < self.late_seconds:
                continue
            before = self._followed.items.get((pod.namespace, pod.name))
            if before is not None and before.uid == pod.uid:
                items[pod.namespace, pod.name] = before
            elif parsed := parse_pod(_object_of(pod), frozenset()):
                items[parsed[0]] = parsed[1]
        before = self._followed
        if items != before.items:
            before.items = MappingProxyType(items)
        before.known, before.problem, before.at_seconds = True, "", wall

    @property
    def ended(self) -> frozenset[PodName]:
        """Whom the kubelet lists still and the API no more."""
        return self._endings.left

    @property
    def known(self) -> bool:
        """Whether pods were listed."""
        return self._followed.known

    @property
    def at_seconds(self) -> float | None:
        """Of the last sign of life."""
        return self._followed.at_seconds

    @property
    def problem(self) -> str:
        """Why there is no newer one."""
        return self._followed.problem

    def note(self, allocations: Allocations, now: float) -> None:
        """Take note of a new answer of the kubelet."""
        self._advance(now)
        self._endings.note((one.namespace, one.pod) for one in allocations.containers)

    def evidence(self, now: float) -> Evidence:
        """Give what the join looks at."""
        self._advance(now)
        listed = self._followed.at_seconds is not None
        self._endings.update(self._followed.items, self._steady)
        new = Evidence(
            pods=self._endings.pods if listed else None,
            is_followed=self._followed.known and not self._followed.problem,
            ended=self._endings.left,
        )
        if new != self._evidence:
            self._evidence = new
        return self._evidence

    def facts(self, namespace: str, pod: str) -> PodFacts | None:
        """Say whose a pod is."""
        found = self._endings.find((namespace, pod))
        if found is None:
            return None
        cached = self._facts.get((namespace, pod))
        if cached is None or cached[0] is not found:
            cached = self._facts[namespace, pod] = (found, facts_of(found, {}, {}, RULES))
        return cached[1]

    def _advance(self, now: float) -> None:
        if self._last_now is not None:
            self._steady += min(max(now - self._last_now, 0.0), 10.0)
        self._last_now = now


def _object_of(pod: Pod) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "labels": {"team": pod.team},
    }
    if pod.job:
        metadata["ownerReferences"] = [
            {"controller": True, "kind": "Job", "name": pod.job, "apiVersion": "batch/v1", "uid": "j"}
        ]
    return {"metadata": metadata}
