"""Follows what the Kubernetes API says of this node: pods, owners, claims and node labels."""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from sys import intern
from typing import Any, Final

from exporter.attribution import vgpu
from exporter.attribution.owner_rules import OwnerRules, facts_of, wanted_annotations
from exporter.attribution.pod_lifecycle import Endings, Evidence, PodName
from exporter.attribution.policy import label_text
from exporter.kube.api_client import METADATA_WATCH, ApiClient, Request
from exporter.kube.dra import DraReader
from exporter.kube.list_watch import INCOMPLETE, TEXT_LIMIT, ListWatch, Lookups, mapping_of, text_of
from exporter.model import Allocations, NodeFacts, PodFacts, PodMetadata

ON_DEMAND: Final = "on-demand"
SPOT: Final = "spot"
RESERVED: Final = "reserved"

_INSTANCE_TYPE = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
_REGION = ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")
_GPU_PRODUCT = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/model",
    "gpu.nvidia.com/class",
)
_CAPACITY: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("karpenter.sh/capacity-type", {"spot": SPOT, "on-demand": ON_DEMAND, "reserved": RESERVED}),
    ("eks.amazonaws.com/capacitytype", {"spot": SPOT, "on_demand": ON_DEMAND, "capacity_block": RESERVED}),
    ("cloud.google.com/gke-spot", {"true": SPOT}),
    ("cloud.google.com/gke-preemptible", {"true": SPOT}),
    ("cloud.google.com/gke-provisioning", {"spot": SPOT, "preemptible": SPOT, "standard": ON_DEMAND}),
    ("kubernetes.azure.com/scalesetpriority", {"spot": SPOT, "regular": ON_DEMAND}),
)
"""Keys in lower case; the first that is there and understood counts."""
_LIMIT = 128


def node_facts(labels: Mapping[str, str]) -> NodeFacts:
    """Read a node's labels; what no label says stays empty."""
    return NodeFacts(
        instance_type=_first(labels, _INSTANCE_TYPE),
        capacity_type=_capacity(labels),
        region=_first(labels, _REGION),
        gpu_product=_first(labels, _GPU_PRODUCT),
    )


def _first(labels: Mapping[str, str], keys: tuple[str, ...]) -> str:
    return next(filter(None, (label_text(labels.get(key, ""), _LIMIT) for key in keys)), "")


def _capacity(labels: Mapping[str, str]) -> str:
    lower = {key.lower(): value.strip().lower() for key, value in labels.items()}
    words = (meanings.get(lower.get(key, ""), "") for key, meanings in _CAPACITY)
    return next(filter(None, words), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What a namespace says; empty where it says nothing or may not be read."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Only those that are read."""


NO_NAMESPACE = Namespace()


LONG_TEXT_LIMIT = 64 << 10
"""A device list of HAMi has a line per container and device."""
KEYS_LIMIT = 512
"""Labels of one object; a node has up to some 200, a pod a dozen."""
LONG_KEYS = vgpu.VGPU_KEYS | vgpu.KAI_KEYS
"""Annotations that are kept of every pod, whatever is configured."""

_KEY_LIMIT = 317
_NAME_LIMIT = 253
_CONFIG_HASH = "kubernetes.io/config.hash"
_CONFIG_MIRROR = "kubernetes.io/config.mirror"
_HASH = re.compile(r"[0-9a-f]{32}", re.ASCII)


def parse_pod(item: Mapping[str, Any], wanted: frozenset[str]) -> tuple[tuple[str, str], PodMetadata] | None:
    """Read one pod.

    Args:
        item: A Pod or the PartialObjectMetadata of one; anything is borne.
        wanted: Annotations to keep, in addition to those of parts of GPUs.

    Returns:
        (namespace, name) and the pod; ``None`` for what has no name.
    """
    metadata = mapping_of(item.get("metadata"))
    namespace, name = text_of(metadata.get("namespace"), _NAME_LIMIT), text_of(metadata.get("name"), _NAME_LIMIT)
    if not namespace or not name:
        return None
    controller = _controller(metadata.get("ownerReferences"))
    kind = text_of(controller.get("kind"), _NAME_LIMIT)
    pod = PodMetadata(
        namespace=intern(namespace),
        name=name,
        uid=_uid(metadata, kind),
        labels=labels_of(item),
        annotations=annotations_of(item, wanted | LONG_KEYS),
        owner_kind=intern(kind),
        owner_name=text_of(controller.get("name"), _NAME_LIMIT),
        owner_api=intern(text_of(controller.get("apiVersion"), _NAME_LIMIT)),
    )
    return (pod.namespace, pod.name), pod


def labels_of(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of an object that are text or can be."""
    return _texts(mapping_of(mapping_of(item.get("metadata")).get("labels")))


def annotations_of(item: Mapping[str, Any], wanted: frozenset[str]) -> dict[str, str]:
    """Return the wanted annotations of an object."""
    annotations = mapping_of(mapping_of(item.get("metadata")).get("annotations"))
    return _texts({key: annotations[key] for key in wanted if key in annotations})


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, value in values.items():
        if value is None or isinstance(value, (list, dict)):
            continue
        if len(texts) == KEYS_LIMIT:
            break
        texts[intern(text_of(key, _KEY_LIMIT))] = text_of(value, LONG_TEXT_LIMIT if key in LONG_KEYS else TEXT_LIMIT)
    return texts


def _controller(references: object) -> Mapping[str, Any]:
    if not isinstance(references, list):
        return {}
    owners = (mapping_of(reference) for reference in references)
    return next((owner for owner in owners if owner.get("controller") is True), {})


def _uid(metadata: Mapping[str, Any], owner_kind: str) -> str:
    """Return the UID in the pod's cgroups: of a static pod it is its file's hash.

    Any client may write the hash; only the node may mark a pod as the mirror of a static one.
    """
    annotations = mapping_of(metadata.get("annotations"))
    file_hash = text_of(annotations.get(_CONFIG_HASH), _NAME_LIMIT)
    if _HASH.fullmatch(file_hash) and (_CONFIG_MIRROR in annotations or owner_kind == "Node"):
        return file_hash
    return text_of(metadata.get("uid"), _NAME_LIMIT).lower()


LOG = logging.getLogger("exporter.kube.metadata")

UNFINISHED = "status.phase!=Succeeded,status.phase!=Failed"
"""Pods that have finished come as deleted; without it only whole pods would show it."""
_FINISHED = frozenset({"Succeeded", "Failed"})

LOST_SECONDS = 300.0
"""An API server that is renewed is away for minutes; what was read of pods that run stays true."""

_WITHOUT_NODE = (
    "GPUs are unpriced where the price may depend on this node's labels, unless an earlier run has read them "
    "(or set --instance-type, --capacity-type and --region)"
)
NAME_NODE = "set it (NODE_NAME) to spec.nodeName of the agent's pod, as `kubectl get nodes` prints it"
_WITHOUT_NAMESPACES = "teams and cost labels that only namespaces name are not known (or set --namespace-teams off)"
_FACTS_LIMIT = 4096
_UNEXPECTED_SECONDS = 60.0
"""A part that failed unexpectedly starts again after this, give or take half."""
_LONGEST_STEP_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataSettings:
    """What is configured."""

    node: str
    kubeconfig: Path | None = None
    """``None``: the pod's service account, else the user's own file."""
    start_jitter_seconds: float = 0.0
    """The first question comes after a random part of it."""
    rules: OwnerRules = field(default_factory=OwnerRules)
    namespace_teams: bool = True
    """Whether namespaces are read, for teams, cost labels and policies said there."""
    reservation_namespaces: tuple[str, ...] = ()
    own_pod: tuple[str, str] | None = None


class Metadata:
    """Everything of the API that the agent needs; a part that cannot be had costs only that part.

    Args:
        settings: What is configured.
        clock: Unix time now.
        random: 0..1, for waits that thousands of agents must not share.
    """

    def __init__(self, settings: MetadataSettings, *, clock: Callable[[], float], random: Callable[[], float]) -> None:
        self._settings = settings
        wanted = wanted_annotations(settings.rules)
        self._client = ApiClient(settings.kubeconfig, random=random)
        self._pods = _followed_pods(self._client, settings, wanted, clock)
        self._phases: Lookups[PodName, bool] = Lookups(
            self._client,
            request=lambda name: Request(
                f"/api/v1/namespaces/{name[0]}/pods",
                {"fieldSelector": f"metadata.name={name[1]},spec.nodeName={settings.node}"},
            ),
            parse=_has_finished,
            steady=self._steady_now,
        )
        self._node: Lookups[str, NodeFacts] = Lookups(
            self._client,
            request=lambda name: Request(f"/api/v1/nodes/{name}", accept=METADATA_WATCH),
            parse=lambda _name, item: node_facts(labels_of(item)),
            steady=self._steady_now,
            absent_is_problem=True,
        )
        self._node.want(settings.node)
        self._namespaces: Lookups[str, Namespace] = Lookups(
            self._client,
            request=lambda name: Request(f"/api/v1/namespaces/{name}", accept=METADATA_WATCH),
            parse=lambda _name, item: Namespace(labels=labels_of(item), annotations=annotations_of(item, wanted)),
            steady=self._steady_now,
        )
        self._dra = DraReader(self._client, settings.node, clock=clock, steady=self._steady_now)
        self._endings = Endings()
        self._unexpected: dict[str, str] = {}
        self._unexpected_count = 0
        self._steady = 0.0
        self._last_now: float | None = None
        self._asked_for: set[str] = set()
        self._facts: dict[PodName, tuple[PodMetadata, Namespace, PodFacts]] = {}
        self._evidence = Evidence(
            reads_claims=True, own_pod=settings.own_pod, reservation_namespaces=settings.reservation_namespaces
        )

    @property
    def known(self) -> bool:
        """Whether the pods have been listed and changes are followed."""
        return self._pods.known and not self._is_other_node

    @property
    def _is_other_node(self) -> bool:
        """Whether the API knows no node of the configured name, so that an empty list of its pods says nothing."""
        problem = self._node.problem
        return problem is not None and problem.reason == "not_found" and not self._pods.items

    @property
    def at_seconds(self) -> float | None:
        """Unix time of the API's last sign of life."""
        return self._pods.at_seconds

    @property
    def node_facts(self) -> NodeFacts | None:
        """What the node's labels say; ``None`` until they were read."""
        return self._node.items.get(self._settings.node)

    @property
    def problem(self) -> str:
        """One line on what cannot be had and how to fix it; empty when all is well."""
        parts = [
            (error.reason, f"{error}; {without}")
            for error, without in ((self._node.problem, _WITHOUT_NODE), (self._namespaces.problem, _WITHOUT_NAMESPACES))
            if error and error.reason != "not_found"
        ]
        if self._node.problem and self._node.problem.reason == "not_found":
            wrong = f"the API at {self._client.address} has no node {self._settings.node!r}"
            parts.insert(0, ("not_found", f"{wrong}, the value of --node-name: {NAME_NODE}"))
        parts += self._dra.problems
        # While the API itself is away, that is said once and not by every part.
        lines = [text for reason, text in parts if not self._pods.problem or reason == "forbidden"]
        return "; ".join(dict.fromkeys(filter(None, [self._pods.problem, *lines, *self._unexpected.values()])))

    @property
    def names_other_node(self) -> bool:
        """Whether ``problem`` is that --node-name is not this node's name in the cluster."""
        if self._pods.failure:
            return self._pods.failure.reason == INCOMPLETE
        return self._node.problem is not None and self._node.problem.reason == "not_found"

    @property
    def remark(self) -> str:
        """One line on what is not well though all can be had; empty when there is nothing to say."""
        skew_seconds = self._pods.skew_seconds
        if not skew_seconds:
            return ""
        way = "ahead of" if skew_seconds > 0 else "behind"
        remark = f"this node's clock is {abs(skew_seconds):.0f} s {way} the API server's"
        return f"{remark}: opt-outs and tokens end at the wrong time; see why: chronyc tracking"

    @property
    def errors(self) -> Mapping[str, int]:
        """Counts since the start by reason; of all but the pods with the part before it."""
        errors = Counter(self._pods.errors)
        for part, counts in (
            ("node", self._node.errors),
            ("namespace", self._namespaces.errors),
            ("phase", self._phases.errors),
        ):
            errors.update({f"{part}_{reason}": count for reason, count in counts.items()})
        errors.update(self._dra.errors)
        if self._unexpected_count:
            errors["unexpected"] += self._unexpected_count
        return dict(errors)

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            await asyncio.sleep(self._settings.start_jitter_seconds * self._client.random())
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pods.run())  # bears anything by itself
                parts = (
                    ("node", self._node),
                    ("namespaces", self._namespaces),
                    ("phases", self._phases),
                    ("claims", self._dra),
                )
                for name, part in parts:
                    group.create_task(self._run_on(name, part.run))
        finally:
            await self._client.close()

    async def _run_on(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run a part until cancelled: an unexpected error must not end the agent, which meters without the API too."""
        while True:
            try:
                await run()
            except Exception as error:
                LOG.exception("Kubernetes API: reading %s failed unexpectedly; it is begun again", name)
                self._unexpected_count += 1
                self._unexpected[name] = f"{name}: unexpected {type(error).__name__}; the agent's log has the cause"
            await asyncio.sleep(_UNEXPECTED_SECONDS * (0.5 + self._client.random()))
            self._unexpected.pop(name, None)

    def note(self, allocations: Allocations, now: float) -> None:
        """Note a new answer of the kubelet: its namespaces and claims are read, its pods should be known."""
        self._advance(now)
        pods = {(container.namespace, container.pod) for container in allocations.containers}
        self._endings.note(pods)
        self._facts = {name: known for name, known in self._facts.items() if self._endings.find(name) is known[0]}
        self._dra.note(allocations)
        if self._settings.namespace_teams:
            self._namespaces.keep({namespace for namespace, _ in pods if namespace} | self._asked_for)
            self._asked_for.clear()

    def evidence(self, now: float) -> Evidence:
        """Return what the join is to look at, the same object while nothing changes."""
        self._advance(now)
        listed = self._pods.at_seconds is not None and not self._is_other_node
        if listed:
            self._endings.update(self._pods.items, self._steady)
            self._phases.keep(self._endings.strangers)
        new = Evidence(
            pods=self._endings.pods if listed else None,
            is_followed=self.known and not self._pods.problem,
            ended=self._endings.left | {name for name, finished in self._phases.items.items() if finished},
            claims=self._dra.claims,
            unreadable_claims=self._dra.unreadable,
            reads_claims=self._dra.reads_claims,
            devices=self._dra.devices,
            own_pod=self._settings.own_pod,
            reservation_namespaces=self._settings.reservation_namespaces,
        )
        if new != self._evidence:
            self._evidence = new
        return self._evidence

    def facts(self, namespace: str, pod: str) -> PodFacts | None:
        """Return the owner and facts of a pod; ``None`` until it and, where that counts, its namespace are known."""
        name = (namespace, pod)
        found = self._endings.find(name)
        if found is None:
            self._facts.pop(name, None)
            return None
        space = self._namespace(namespace)
        if space is None:
            return None
        cached = self._facts.get(name)
        if cached is not None and cached[0] is found and cached[1] is space:
            return cached[2]
        if len(self._facts) >= _FACTS_LIMIT:
            self._facts.clear()
        facts = facts_of(found, space.labels, space.annotations, self._settings.rules)
        self._facts[name] = (found, space, facts)
        return facts

    def uid(self, namespace: str, pod: str) -> str | None:
        """Return the UID of a pod, as its cgroups have it."""
        found = self._endings.find((namespace, pod))
        return found.uid if found and found.uid else None

    def _namespace(self, name: str) -> Namespace | None:
        if not self._settings.namespace_teams:
            return NO_NAMESPACE
        self._asked_for.add(name)
        self._namespaces.want(name)
        space = self._namespaces.items.get(name)
        if space is None and self._namespaces.given_up(name):
            return NO_NAMESPACE
        return space

    def _advance(self, now: float) -> None:
        """Let time pass by the agent's steps, so that a clock that is set neither holds up nor hastens anything."""
        if self._last_now is not None:
            self._steady += min(max(now - self._last_now, 0.0), _LONGEST_STEP_SECONDS)
        self._last_now = now

    def _steady_now(self) -> float:
        return self._steady


def _followed_pods(
    client: ApiClient,
    settings: MetadataSettings,
    wanted: frozenset[str],
    clock: Callable[[], float],
) -> ListWatch[PodMetadata]:
    """Make the list and watch of this node's pods, which must have the agent's own pod among them."""
    return ListWatch(
        client,
        path="/api/v1/pods",
        query={"fieldSelector": f"spec.nodeName={settings.node},{UNFINISHED}"},
        metadata_only=True,
        parse=partial(parse_pod, wanted=wanted),
        clock=clock,
        keep_seconds=LOST_SECONDS,
        canary=settings.own_pod,
        canary_fix=f"--node-name is {settings.node!r}: {NAME_NODE}",
    )


def _has_finished(name: PodName, listed: Mapping[str, Any]) -> bool:
    """Read the phase of one pod; a pod that the API does not have may be a static one without a mirror."""
    for item in listed.get("items") or ():
        metadata, status = item.get("metadata") or {}, item.get("status") or {}
        if (metadata.get("namespace"), metadata.get("name")) == name:
            return status.get("phase") in _FINISHED
    return False
