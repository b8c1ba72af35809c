"""Follows the data of this node in the Kubernetes API: pods, owners, claims and node labels."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from sys import intern
from typing import Any

from exporter.attribution import vgpu
from exporter.attribution.owner_rules import OwnerRules, facts_of, label_text, wanted_annotations
from exporter.attribution.pod_lifecycle import Endings, Evidence, PodName
from exporter.kube.api_client import METADATA_WATCH, ApiClient, Request
from exporter.kube.credentials import Credentials
from exporter.kube.dra import DraReader
from exporter.kube.list_watch import INCOMPLETE, NAME_LIMIT, TEXT_LIMIT, ListWatch, Lookups, key_of, mapping_at, text_of
from exporter.model.attribution import Allocations, MetadataStatus, NodeFacts, PodFacts, PodMetadata

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
    ("karpenter.sh/capacity-type", {"spot": "spot", "on-demand": "on-demand", "reserved": "reserved"}),
    ("eks.amazonaws.com/capacitytype", {"spot": "spot", "on_demand": "on-demand", "capacity_block": "reserved"}),
    ("cloud.google.com/gke-spot", {"true": "spot"}),
    ("cloud.google.com/gke-preemptible", {"true": "spot"}),
    ("cloud.google.com/gke-provisioning", {"spot": "spot", "preemptible": "spot", "standard": "on-demand"}),
    ("kubernetes.azure.com/scalesetpriority", {"spot": "spot", "regular": "on-demand"}),
)
"""Label keys in lower case, by fact; the first key with a valid value counts."""
_LIMIT = 128


def node_facts(labels: Mapping[str, str]) -> NodeFacts:
    """Return the facts in a node's labels; facts without a label are empty."""
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
    """Labels and annotations of a namespace; empty if it has none or cannot be read."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Annotations that the agent reads, without others."""


NO_NAMESPACE = Namespace()


LONG_TEXT_LIMIT = 64 << 10
"""Maximum length of long texts; a device list of HAMi has an element per container and device."""
KEYS_LIMIT = 512
"""Maximum number of labels of one object; a node has up to about 200, a pod about a dozen."""
LONG_KEYS = vgpu.KEYS
"""Annotations that are kept for every pod, independent of the configuration, and can be long."""

_KEY_LIMIT = 317
_CONFIG_HASH = "kubernetes.io/config.hash"
_CONFIG_MIRROR = "kubernetes.io/config.mirror"
_HASH = re.compile(r"[0-9a-f]{32}", re.ASCII)


def parse_pod(item: Mapping[str, Any], wanted: frozenset[str]) -> PodMetadata | None:
    """Parse one pod.

    Args:
        item: A Pod or its PartialObjectMetadata; any content is allowed.
        wanted: Annotations to keep, in addition to those of fractions of GPUs.

    Returns:
        The pod; ``None`` for an object without a name.
    """
    metadata, (namespace, name) = mapping_at(item, "metadata"), key_of(item)
    if not namespace or not name:
        return None
    controller = _controller(metadata.get("ownerReferences"))
    kind = text_of(controller.get("kind"), NAME_LIMIT)
    return PodMetadata(
        namespace=intern(namespace),
        name=name,
        uid=_uid(metadata, kind),
        labels=labels_of(item),
        annotations=annotations_of(item, wanted | LONG_KEYS),
        owner_kind=intern(kind),
        owner_name=text_of(controller.get("name"), NAME_LIMIT),
        owner_api=intern(text_of(controller.get("apiVersion"), NAME_LIMIT)),
    )


def labels_of(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of an object whose values are text or can be converted to it."""
    return _texts(mapping_at(item, "metadata", "labels"))


def annotations_of(item: Mapping[str, Any], wanted: frozenset[str]) -> dict[str, str]:
    """Return the wanted annotations of an object."""
    annotations = mapping_at(item, "metadata", "annotations")
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
    owners = (mapping_at(reference) for reference in references)
    return next((owner for owner in owners if owner.get("controller") is True), {})


def _uid(metadata: Mapping[str, Any], owner_kind: str) -> str:
    """Return the UID in the pod's cgroups: for a static pod, the hash of its file.

    Any client may write the hash, but only the node may mark a pod as the mirror of a static pod.
    """
    annotations = mapping_at(metadata, "annotations")
    file_hash = text_of(annotations.get(_CONFIG_HASH), NAME_LIMIT)
    if _HASH.fullmatch(file_hash) and (_CONFIG_MIRROR in annotations or owner_kind == "Node"):
        return file_hash
    return text_of(metadata.get("uid"), NAME_LIMIT).lower()


LOG = logging.getLogger("exporter.kube.metadata")

UNFINISHED = "status.phase!=Succeeded,status.phase!=Failed"
"""Selector with which finished pods appear as deleted. Without it, the end of a pod would need the whole object."""
_FINISHED = frozenset({"Succeeded", "Failed"})

LOST_SECONDS = 300.0
"""Time for which data stays valid without the API; the replacement of an API server takes minutes."""

_WITHOUT_NODE = (
    "GPUs are unpriced where the price may depend on this node's labels, unless an earlier run has read them "
    "(or set --instance-type, --capacity-type and --region)"
)
NAME_NODE = "set it (NODE_NAME) to spec.nodeName of the agent's pod, as `kubectl get nodes` prints it"
_WITHOUT_NAMESPACES = "teams and cost labels that only namespaces name are not known (or set --namespace-teams off)"
_UNEXPECTED_SECONDS = 60.0
"""Mean wait before the restart of a part after an unexpected error, plus or minus 50 %."""
_LONGEST_STEP_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataSettings:
    """Settings of ``Metadata``."""

    node: str
    kubeconfig: Path | None = None
    """Kubeconfig file; ``None``: the pod's service account, otherwise the user's default file."""
    start_jitter_seconds: float = 0.0
    """Upper limit of the random wait before the first request."""
    rules: OwnerRules = field(default_factory=OwnerRules)
    namespace_teams: bool = True
    """Whether namespaces are read, for teams, cost labels and policies."""
    reservation_namespaces: tuple[str, ...] = ()
    own_pod: tuple[str, str] | None = None


class Metadata:
    """Reads all API data that the agent needs; a failure of one part does not affect the others.

    Args:
        settings: Configuration.
        clock: Returns the current Unix time.
        random: Returns 0..1, for jitter between thousands of agents.
    """

    def __init__(self, settings: MetadataSettings, *, clock: Callable[[], float], random: Callable[[], float]) -> None:
        self._settings = settings
        wanted = wanted_annotations(settings.rules)
        self._client = ApiClient(Credentials(kubeconfig=settings.kubeconfig), random=random)
        self._pods = ListWatch(
            client=self._client,
            path="/api/v1/pods",
            query={"fieldSelector": f"spec.nodeName={settings.node},{UNFINISHED}"},
            metadata_only=True,
            parse=partial(parse_pod, wanted=wanted),
            clock=clock,
            keep_seconds=LOST_SECONDS,
            canary=settings.own_pod,
            canary_fix=f"--node-name is {settings.node!r}: {NAME_NODE}",
        )
        self._phases: Lookups[PodName, bool] = Lookups(
            client=self._client,
            request=lambda name: Request(
                f"/api/v1/namespaces/{name[0]}/pods",
                {"fieldSelector": f"metadata.name={name[1]},spec.nodeName={settings.node}"},
            ),
            parse=_has_finished,
            steady=self._steady_now,
        )
        self._node: Lookups[str, NodeFacts] = Lookups(
            client=self._client,
            request=lambda name: Request(f"/api/v1/nodes/{name}", accept=METADATA_WATCH),
            parse=lambda _name, item: node_facts(labels_of(item)),
            steady=self._steady_now,
            absent_is_problem=True,
        )
        self._node.want(settings.node)
        self._namespaces: Lookups[str, Namespace] = Lookups(
            client=self._client,
            request=lambda name: Request(f"/api/v1/namespaces/{name}", accept=METADATA_WATCH),
            parse=lambda _name, item: Namespace(labels=labels_of(item), annotations=annotations_of(item, wanted)),
            steady=self._steady_now,
        )
        self._dra = DraReader(self._client, settings.node, clock=clock, steady=self._steady_now)
        self._endings = Endings()
        self._unexpected: dict[str, str] = {}
        self._steady = 0.0
        self._last_now: float | None = None
        self._asked_for: set[str] = set()
        self._facts: dict[PodName, tuple[PodMetadata, Namespace, PodFacts]] = {}
        self._evidence = Evidence(
            reads_claims=True, own_pod=settings.own_pod, reservation_namespaces=settings.reservation_namespaces
        )

    @property
    def _lookups(self) -> dict[str, Lookups[Any, Any]]:
        return {"node": self._node, "namespace": self._namespaces, "phase": self._phases}

    @property
    def _is_other_node(self) -> bool:
        """Whether the API has no node with the configured name, so that an empty list of its pods is not reliable."""
        return self._is_node_absent and not self._pods.items

    @property
    def address(self) -> str:
        """URL of the API server for messages."""
        return self._client.address

    @property
    def status(self) -> MetadataStatus:
        """State of the data."""
        failure = self._pods.failure
        return MetadataStatus(
            known=self._is_known,
            at_seconds=self._pods.at_seconds,
            problem=self._problem,
            names_other_node=failure.reason == INCOMPLETE if failure else self._is_node_absent,
            remark=_remark(self._pods.skew_seconds),
        )

    @property
    def _is_known(self) -> bool:
        return self._pods.known and not self._is_other_node

    @property
    def _is_node_absent(self) -> bool:
        return self._node.problem is not None and self._node.problem.reason == "not_found"

    @property
    def node_facts(self) -> NodeFacts | None:
        """Facts in the node's labels; ``None`` until they are read."""
        return self._node.items.get(self._settings.node)

    @property
    def _problem(self) -> str:
        """Missing data and the fix, in one line; empty without a problem."""
        parts = [
            (error.reason, f"{error}; {without}")
            for error, without in ((self._node.problem, _WITHOUT_NODE), (self._namespaces.problem, _WITHOUT_NAMESPACES))
            if error and error.reason != "not_found"
        ]
        if self._is_node_absent:
            wrong = f"the API at {self._client.address} has no node {self._settings.node!r}"
            parts.insert(0, ("not_found", f"{wrong}, the value of --node-name: {NAME_NODE}"))
        parts += self._dra.problems
        # If the API does not answer, one message is enough for all parts.
        lines = [text for reason, text in parts if not self._pods.problem or reason == "forbidden"]
        return "; ".join(dict.fromkeys(filter(None, [self._pods.problem, *lines, *self._unexpected.values()])))

    @property
    def errors(self) -> Mapping[str, int]:
        """Counts since the start by reason, with the part as prefix except for pods."""
        parts = {name: part.errors for name, part in self._lookups.items()} | self._dra.errors
        by_part = {f"{part}_{reason}": count for part, counts in parts.items() for reason, count in counts.items()}
        return {**self._pods.errors, **by_part}

    @property
    def answered(self) -> bool:
        """Whether each part was read at least once, or cannot be read now."""
        by_name = all(one.answered for one in self._lookups.values())
        return by_name and self._pods.answered and self._dra.answered

    async def run(self) -> None:
        """Read and follow all parts until cancelled."""
        try:
            await asyncio.sleep(self._settings.start_jitter_seconds * self._client.random())
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pods.run())  # handles any error itself
                for name, part in self._lookups.items():
                    group.create_task(self._run_on(name, part.run))
                group.create_task(self._run_on("claim", self._dra.run))
        finally:
            await self._client.close()

    async def _run_on(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run a part until cancelled; restart it after unexpected errors, since the agent also meters without it."""
        while True:
            try:
                await run()
            except Exception as error:
                LOG.exception("Kubernetes API: reading %s failed unexpectedly; it starts again", name)
                self._pods.errors["unexpected"] += 1
                self._unexpected[name] = f"{name}: unexpected {type(error).__name__}; the agent's log has the cause"
            await asyncio.sleep(_UNEXPECTED_SECONDS * (0.5 + self._client.random()))
            self._unexpected.pop(name, None)

    def note(self, allocations: Allocations, now: float) -> None:
        """Process a new answer of the kubelet: request its namespaces and claims, and record its pods."""
        self._advance(now)
        pods = {(container.namespace, container.pod) for container in allocations.containers}
        self._endings.note(pods)
        self._facts = {name: known for name, known in self._facts.items() if self._endings.find(name) is known[0]}
        self._dra.note(allocations)
        if self._settings.namespace_teams:
            self._namespaces.keep({namespace for namespace, _ in pods if namespace} | self._asked_for)
            self._asked_for.clear()

    def evidence(self, now: float) -> Evidence:
        """Return the evidence for the join, the same object while nothing changes."""
        self._advance(now)
        listed = self._pods.at_seconds is not None and not self._is_other_node
        if listed:
            self._endings.update(self._pods.items, self._steady)
            self._phases.keep(self._endings.strangers)
        new = replace(
            self._evidence,
            pods=self._endings.pods if listed else None,
            is_followed=self._is_known and not self._pods.problem,
            ended=self._endings.left | {name for name, finished in self._phases.items.items() if finished},
            claims=self._dra.claims,
            unreadable_claims=self._dra.unreadable,
            reads_claims=self._dra.reads_claims,
            devices=self._dra.devices,
        )
        if new != self._evidence:
            self._evidence = new
        return self._evidence

    def facts(self, namespace: str, pod: str) -> PodFacts | None:
        """Return the owner and facts of a pod; ``None`` until the pod and, if needed, its namespace are known."""
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
        facts = facts_of(found, space.labels, space.annotations, self._settings.rules)
        self._facts[name] = (found, space, facts)
        return facts

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
        """Advance the internal time by at most ``_LONGEST_STEP_SECONDS``, so that clock changes have no effect."""
        if self._last_now is not None:
            self._steady += min(max(now - self._last_now, 0.0), _LONGEST_STEP_SECONDS)
        self._last_now = now

    def _steady_now(self) -> float:
        return self._steady


def _remark(skew_seconds: float | None) -> str:
    if not skew_seconds:
        return ""
    way = "ahead of" if skew_seconds > 0 else "behind"
    remark = f"this node's clock is {abs(skew_seconds):.0f} s {way} the API server's"
    return f"{remark}: opt-outs and tokens end at the wrong time; check it with chronyc tracking"


def _has_finished(name: PodName, listed: Mapping[str, Any]) -> bool:
    """Return whether a pod has finished; a pod that the API lacks may be a static pod without a mirror."""
    for item in listed.get("items") or ():
        if key_of(item) == name:
            return mapping_at(item, "status").get("phase") in _FINISHED
    return False
