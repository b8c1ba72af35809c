"""Targets of the Kubernetes API: lists and watch streams as a server sends them, objects as the join sees them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from fuzz_page import NOW, Known, gpus, lived, node
from fuzz_targets import Scratch, check_message, require, target

from exporter.attribution.device_ids import GPU_DRA_DRIVER
from exporter.attribution.owner_rules import OwnerRules, facts_of, wanted_annotations
from exporter.attribution.pod_lifecycle import Evidence
from exporter.errors import ApiError
from exporter.kube import api_client, dra, metadata
from exporter.kube.api_client import ApiClient
from exporter.kube.list_watch import ListWatch
from exporter.model import Allocations, ClaimedDevice, ContainerAllocation, DeviceIds, PodMetadata

_RULES = OwnerRules(
    team_keys=("team",), cost_labels=("app", "team"), exported_labels=("app",), exported_annotations=("cost-code",)
)
_WANTED = wanted_annotations(_RULES)
_CLAIM_UID = "0a0a0a0a-1111-2222-3333-444444444444"
_CDI = f"k8s.gpu.nvidia.com/claim={_CLAIM_UID}-gpu-0"


class _Over(BaseException):
    """Everything that there was has been read; nothing may catch it."""


class _Content:
    """A body in two pieces, as a network cuts it."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Give the pieces."""
        middle = len(self._body) // 2
        for piece in (self._body[:middle], self._body[middle:]):
            if piece:
                yield piece


class FedApi(ApiClient):
    """The client with bodies put in where HTTP gives them, one per request."""

    def __init__(self, bodies: list[bytes]) -> None:
        super().__init__(None, random=lambda: 0.5, environ={}, service_account=Scratch.folder())
        self._bodies = bodies
        self.date = "Sat, 21 Nov 2026 22:00:00 GMT"

    async def _answer(self, *_asked: object) -> Any:  # noqa: ANN401 - what stands for a response
        if not self._bodies:
            raise _Over
        return SimpleNamespace(content=_Content(self._bodies.pop(0)), release=lambda: None, close=lambda: None)


async def _end(_seconds: float) -> None:
    raise _Over


async def followed(bodies: list[bytes]) -> ListWatch[PodMetadata]:
    """Pods after these answers of a server, until there are no more."""
    pods: ListWatch[PodMetadata] = ListWatch(
        FedApi(bodies),
        path="/api/v1/pods",
        query={},
        metadata_only=True,
        parse=lambda item: metadata.parse_pod(item, _WANTED),
        clock=lambda: NOW,
        sleep=_end,
    )
    with contextlib.suppress(_Over):
        await pods.run()
    return pods


@target("api", "watch")
def _watch(data: bytes) -> None:
    """A list's body, then a watch's lines behind the first line's end."""
    listed, _, events = data.partition(b"\n")
    pods = asyncio.run(followed([listed, events]))
    if pods.problem:
        check_message(ApiError("", pods.problem))
    _shown(dict(pods.items), {})


def _shown(pods: dict[tuple[str, str], PodMetadata], more: dict[str, Any]) -> None:
    """Each of some pods holds something by each way that there is, and the page is valid."""
    ways = (
        DeviceIds(resource="nvidia.com/gpu", ids=(gpus()[0].gpu.uuid + "::1",)),
        DeviceIds(resource="nvidia.com/gpu", ids=(gpus()[1].gpu.uuid + "-0",)),
        DeviceIds(resource="volcano.sh/vgpu-number", ids=(gpus()[1].gpu.uuid + "-0",)),
        DeviceIds(resource="volcano.sh/gpu-number", ids=("0",)),
    )
    claim = ClaimedDevice(
        claim_name="claim",
        claim_namespace="team-a",
        driver=GPU_DRA_DRIVER,
        pool="node-a",
        device="gpu-0",
        share_id=None,
        cdi_names=(_CDI,),
    )
    known = list(pods)[:6]
    containers = tuple(
        ContainerAllocation(
            namespace=namespace,
            pod=name,
            container=f"c{number % 2}",
            devices=(ways[number % len(ways)],),
            claims=(claim,) if number % 3 == 0 else (),
        )
        for number, (namespace, name) in enumerate([*known, *known])
    )
    allocations = Allocations(answered_at_seconds=NOW, containers=containers, allocatable=None)
    namespace = more.get("namespace", metadata.NO_NAMESPACE)
    known_of = Known(
        saw=Evidence(pods=pods, reads_claims=True, claims=more.get("claims", {}), devices=more.get("devices")),
        whose={name: facts_of(pod, namespace.labels, namespace.annotations, _RULES) for name, pod in pods.items()},
        node_facts=more.get("node"),
    )
    snapshot = lived(*node(told=allocations, known=known_of))
    for facts in known_of.whose.values():
        for text in (facts.owner.namespace, facts.owner.kind, facts.owner.name, facts.owner.team, facts.queue):
            require(text.isprintable() and len(text) <= 253, f"the text {text!r}")  # noqa: PLR2004 - a name's length
    require(snapshot.taken_at_seconds >= NOW, "no snapshot")


@target("api", "objects", most_bytes=6144)
def _objects(data: bytes) -> None:
    """One JSON object: ``pods`` and ``slices`` are lists, ``namespace``, ``node``, ``claim`` and ``group`` objects."""
    try:
        whole = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return  # told by the client, which is the other target
    if not isinstance(whole, dict):
        return
    parsed = [metadata.parse_pod(item, _WANTED) for item in _dicts(whole.get("pods"))]
    slices = [dra.parse_slice(item) for item in _dicts(whole.get("slices"))]
    pools = dra.pools_of([one[1] for one in slices if one], {})
    devices = {(pool, name): device for pool, some in pools.items() for name, device in some.items()}
    claim = _dict(whole.get("claim"))
    allocated = dra.allocated_devices(claim)
    namespace, node = _dict(whole.get("namespace")), _dict(whole.get("node"))
    dra.served_version(_dict(whole.get("group")))
    _shown(
        dict(one for one in parsed if one),
        {
            "namespace": metadata.Namespace(
                labels=metadata.labels_of(namespace), annotations=metadata.annotations_of(namespace, _WANTED)
            ),
            "devices": devices or None,
            "claims": {dra.uid_of(claim) or _CLAIM_UID: allocated} if allocated is not None else {},
            "node": metadata.node_facts(metadata.labels_of(node)),
        },
    )


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


@target("api", "error", ApiError, most_bytes=1024)
def _error(data: bytes) -> None:
    """A status, the Retry-After header and the body of an answer that is none."""
    status, after, body = [*data.split(b"\n", 2), b"", b""][:3]
    code: object = int(status) if status.isdigit() and len(status) < 4 else status.decode("latin-1")  # noqa: PLR2004 - HTTP
    error = api_client.of_status(
        code,
        "https://api",
        api_client.Request("/api/v1/pods"),
        details=api_client.message_of(body),
        retry_after=after.decode("latin-1"),
    )
    require(0 < api_client.retry_seconds(error, 3, lambda: 0.5) < 400, "a wait")  # noqa: PLR2004 - the longest, and a bit
    raise error
