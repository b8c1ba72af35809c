"""Checks the kubelet and the Kubernetes API: socket, rights, devices and workload manager."""

import asyncio
import base64
import contextlib
import json
import random
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from exporter.attribution.device_ids import GPU_DRA_DRIVER, claim_uid
from exporter.attribution.join import attribute
from exporter.attribution.pod_lifecycle import Evidence, PodName
from exporter.attribution.processes import PodLookup, with_unlisted_uses
from exporter.attribution.tenants import tenant_source
from exporter.config import AgentConfig
from exporter.doctor.findings import Finding, Surroundings, fail, ok, warn
from exporter.errors import ApiError, AttributionError
from exporter.kube.api_client import METADATA_LIST, METADATA_WATCH, ApiClient, Request
from exporter.kube.credentials import Credentials
from exporter.kube.dra import GROUP_PATH
from exporter.kube.kubelet import KubeletClient, own_pod
from exporter.kube.metadata import NAME_NODE, UNFINISHED, Metadata
from exporter.model import Allocations, Attribution, Reading

_LOOKS = 160
_LOOK_SECONDS = 0.05


async def read(around: Surroundings, allocations: Allocations | None, reading: Reading | None) -> Metadata:
    """Let the agent's own reader run until it knows what concerns this node's holders, or for some seconds.

    Args:
        around: The node.
        allocations: The kubelet's answer.
        reading: The driver's last one, ``None`` where there is none.
    """
    config = around.config
    settings = replace(config.metadata_settings(), start_jitter_seconds=0.0)
    metadata = Metadata(settings, clock=around.wall, random=random.random)
    task = asyncio.ensure_future(metadata.run())
    try:
        if allocations:
            metadata.note(allocations, around.wall())
        for _ in range(_LOOKS):
            evidence = metadata.evidence(around.wall())
            pods = holders(join(config, allocations, reading, evidence))
            if task.done() or _is_settled(metadata, evidence, allocations, pods):
                break
            await asyncio.sleep(_LOOK_SECONDS)
        return metadata
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _is_settled(
    metadata: Metadata, evidence: Evidence, allocations: Allocations | None, pods: Collection[PodName]
) -> bool:
    if evidence.pods is None or (metadata.node_facts is None and not metadata.status.problem):
        return False
    containers = allocations.containers if allocations else ()
    read = evidence.claims.keys() | evidence.unreadable_claims
    claims = [one for of in containers for one in of.claims if one.driver == GPU_DRA_DRIVER]
    uids = {uid for one in claims if (uid := claim_uid(one))}
    if not uids <= read or (claims and evidence.devices is None):
        return bool(metadata.status.problem)
    known = [metadata.facts(*name) for name in pods if name in evidence.pods]  # asks for each of them
    return None not in known


NAME, RIGHTS = "kubernetes API", "API rights"
_TIMEOUT_SECONDS = 10.0
_WATCH_SECONDS = 1.0
_MAY_BE_ABSENT = frozenset({"get namespaces", "get nodes"})


def off() -> Finding:
    """Say what an agent that does not ask the API does without."""
    cost = (
        "off: owners are namespaces, without workload and team; instance type and region come from options; claims "
        "(DRA) are taken at the kubelet's word, and fractions of HAMi, volcano-vgpu and KAI are unknown"
    )
    return ok(NAME, f"{cost}; --kube-metadata on changes that")


async def ask_api(
    around: Surroundings, allocations: Allocations | None, reading: Reading | None
) -> tuple[list[Finding], Metadata | None]:
    """Findings on API and rights, and what the API says; ``None`` where it cannot be had.

    Args:
        around: The node.
        allocations: The kubelet's answer, which says whether claims and which namespaces are asked for.
        reading: The driver's last one, ``None`` where there is none.
    """
    config, now = around.config, around.wall
    client = ApiClient(config.owners.kubeconfig, random=random.random)
    try:
        try:
            pods = await client.get(
                "/api/v1/pods",
                {"fieldSelector": f"spec.nodeName={config.attribution.node_name},{UNFINISHED}", "resourceVersion": "0"},
                accept=METADATA_LIST,
                timeout_seconds=_TIMEOUT_SECONDS,
            )
        except ApiError as error:
            return [fail(NAME, str(error), ""), *await _token_findings(config, now())], None
        found = [await _reached(config.attribution.node_name, client, pods)]
        found += [await _rights(config, client, allocations), *await _token_findings(config, now())]
    finally:
        await client.close()
    metadata = await read(around, allocations, reading)
    if remark := metadata.status.remark:
        cause, _, fix = remark.partition("; ")
        found.append(warn("API clock", cause, fix))
    return found, metadata


async def _reached(node_name: str, client: ApiClient, pods: dict[str, Any]) -> Finding:
    """Judge whether the list is of this node: it has this agent's pod, or the API knows a node of this name."""
    names = {(one["metadata"].get("namespace"), one["metadata"].get("name")) for one in pods.get("items") or ()}
    node = f"{client.address}: {len(names)} pods of node {node_name}"
    own = own_pod()
    if own and own not in names:
        wrong = f"{node}, without {'/'.join(own)}, the pod of this agent: {node_name!r} is the value of --node-name"
        return fail(NAME, wrong, NAME_NODE)
    if names:
        return ok(NAME, node)
    try:
        await client.get(f"/api/v1/nodes/{node_name}", timeout_seconds=_TIMEOUT_SECONDS)
    except ApiError as error:
        if error.reason == "not_found":
            wrong = f"{client.address} has no node {node_name!r}, the value of --node-name"
            return fail(NAME, wrong, NAME_NODE)
    return warn(NAME, node, NAME_NODE)


async def _rights(config: AgentConfig, client: ApiClient, allocations: Allocations | None) -> Finding:
    """Try everything that the agent will ask for; a list of pods is granted already."""
    missing: list[str] = []
    granted = ["list pods"]
    async for request in _asked(config, client, allocations):
        try:
            await _try(client, request)
        except ApiError as error:
            # Without the right the answer is a refusal, whether the namespace is there or not.
            if error.reason != "not_found" or request.action not in _MAY_BE_ABSENT:
                missing.append(str(error))
                continue
        granted.append(request.action)
    if missing:
        return warn(RIGHTS, "; ".join(missing), "")
    return ok(RIGHTS, ", ".join(granted))


async def _asked(
    config: AgentConfig, client: ApiClient, allocations: Allocations | None
) -> AsyncGenerator[Request, None]:
    """Yield what the agent asks for, watches with ``watch`` in their query."""
    on_node = f"spec.nodeName={config.attribution.node_name}"
    yield Request("/api/v1/pods", {"fieldSelector": on_node, "resourceVersion": "0", "watch": "1"})
    yield Request(f"/api/v1/nodes/{config.attribution.node_name}")
    containers = allocations.containers if allocations else ()
    if config.owners.namespace_teams:
        yield Request(f"/api/v1/namespaces/{next((one.namespace for one in containers if one.namespace), 'default')}")
    claim = next((one for of in containers for one in of.claims if one.driver == GPU_DRA_DRIVER), None)
    if claim is None:
        return
    try:
        group = await client.get(GROUP_PATH, timeout_seconds=_TIMEOUT_SECONDS)
        version = str(group["preferredVersion"]["version"])
    except (ApiError, LookupError, TypeError):
        version = "v1"
    slices = {"fieldSelector": f"{on_node},spec.driver={GPU_DRA_DRIVER}", "resourceVersion": "0"}
    yield Request(f"{GROUP_PATH}/{version}/resourceslices", slices)
    yield Request(f"{GROUP_PATH}/{version}/resourceslices", {**slices, "watch": "1"})
    path = f"{GROUP_PATH}/{version}/namespaces/{claim.claim_namespace}/resourceclaims/{claim.claim_name}"
    yield Request(path)


async def _try(client: ApiClient, request: Request) -> None:
    """Ask, or open a watch that the server ends at once and leave it with the first word."""
    if "watch" not in request.query:
        await client.get(request.path, request.query, timeout_seconds=_TIMEOUT_SECONDS)
        return
    query = {**request.query, "timeoutSeconds": f"{_WATCH_SECONDS:.0f}"}
    events = client.watch(request.path, query, accept=METADATA_WATCH, silence_seconds=_TIMEOUT_SECONDS)
    async with aclosing(events):
        async for _ in events:
            return


async def _token_findings(config: AgentConfig, now: float) -> list[Finding]:
    """Report when the token ends, if it has an end; one that is renewed in its file is read again."""
    with contextlib.suppress(ApiError):
        settings = await Credentials(config.owners.kubeconfig).read()
        ends = token_ends_seconds(await settings.authorization())
        if ends is not None and ends <= now:
            fix = "have it renewed (a projected service-account token renews itself), and see this node's clock"
            return [warn("API token", f"ended {(now - ends) / 60:.0f} min ago by this node's clock", fix)]
        if ends is not None:
            return [ok("API token", f"ends in {(ends - now) / 60:.0f} min; its file is read again before")]
    return []


def token_ends_seconds(token: str) -> float | None:
    """Unix time at which a JSON web token ends; ``None`` for other tokens and those without an end."""
    parts = token.rpartition(" ")[2].split(".")
    if len(parts) != 3:  # noqa: PLR2004 - header, claims, signature
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return None
    ends = claims.get("exp") if isinstance(claims, dict) else None
    return float(ends) if isinstance(ends, int | float) and not isinstance(ends, bool) else None


_ID_FORMS = "see the id forms in the documentation"
_FIXES = {
    "needs_annotation": "which GPU is meant is in the pod's annotation: --kube-metadata on reads it",
    "unknown_uuid": "the GPU is gone or not shown here: see the check of layers",
    "unknown_minor": "the GPU is gone or not shown here: see the check of layers",
    "dra_unresolved": "the claim's device is in the API: --kube-metadata on reads it",
    "bad_annotation": "the pod's annotation is not of the form that its scheduler writes: kubectl describe it",
    "claim_pending": "the claim is being read; if this stays, see the check of the API",
    "replicas_unknown": "the kubelet does not advertise this shared GPU now, so the number of its replicas is not"
    " known here: see the device plugin's log",
    "memory_unknown": "the driver does not report the memory of the GPU of which the pod has a part: see the driver",
    "unlisted_use": "a process of this pod uses a device that the kubelet lists with no container: an ordinary init"
    " container asked for it, or it was reached without a request; see the limits in docs/owners.md",
    "reservation_pending": "for whom the GPU is reserved is being read; if this stays, see the check of the API",
}
_NO_PODS = (
    "nothing, if this node runs no pods; a kubelet that has just started lists none until the API server answers it:"
    " check that the API server is up, and run doctor again"
)


async def ask_kubelet(around: Surroundings) -> tuple[Finding, Allocations | None]:
    """Whether the kubelet answers, how fast and how much; and its answer.

    An answer without the inventory, which was refused, has no ``allocatable`` and is a warning. Outside a pod an answer
    without any pod is a warning and no answer: a kubelet that has just started gives it as well.
    """
    settings = around.config.attribution
    if not settings.enabled:
        return warn("kubelet", "attribution is off: no pod is named", "set --attribution on"), None
    client = KubeletClient(settings.kubelet_socket, resources=settings.gpu_resources, canary=own_pod())
    start = around.monotonic()
    try:
        allocations = await client.fetch(around.wall())
    except AttributionError as error:
        return fail("kubelet", str(error), ""), None
    took = (around.monotonic() - start) * 1000
    cause = f"{settings.kubelet_socket}: {len(allocations.containers)} containers hold devices, {took:.0f} ms"
    if own_pod() is None and not (allocations.containers or allocations.other_containers):
        return warn("kubelet", f"{settings.kubelet_socket}: no pod is listed, {took:.0f} ms", _NO_PODS), None
    if missed := client.allocatable_error:
        return warn("kubelet", f"{cause}; which devices it advertises could not be read: {missed}", ""), allocations
    return ok("kubelet", cause), allocations


def join(
    config: AgentConfig, allocations: Allocations | None, reading: Reading | None, evidence: Evidence
) -> Attribution | None:
    """Return holders as the agent finds them; ``None`` where the kubelet did not answer."""
    if allocations is None:
        return None
    attribution = attribute(allocations, reading.gpus if reading else (), evidence)
    if reading is None:
        return attribution
    lookup = PodLookup(config.attribution.proc_root, config.attribution.pod_log_root)
    return with_unlisted_uses(attribution, reading, lookup)


def holders(attribution: Attribution | None) -> set[PodName]:
    """Namespace and name of the pods that hold devices."""
    return {(one.namespace, one.pod) for of in attribution.holders.values() for one in of} if attribution else set()


def agreement(attribution: Attribution) -> Finding:
    """Every device that the kubelet lists with a container should be one that the driver shows."""
    name = "kubelet and driver"
    # What a virtual machine has the driver cannot see, and nothing is wrong with that.
    unmatched = [one for one in attribution.unresolved if one.reason != "dra_passed_through"]
    if unmatched:
        first = unmatched[0]
        what = f"{first.device_id} of {first.namespace}/{first.pod} ({first.reason.replace('_', ' ')})"
        more = f" and {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
        return warn(name, f"not to be matched: {what}{more}", _FIXES.get(first.reason, _ID_FORMS))
    return ok(name, f"the driver shows all that is held: {len(attribution.holders)} devices")


_WORKLOAD_MANAGER = "workload manager"


def workload_holders(config: AgentConfig, reading: Reading | None, now: float) -> Finding:
    """Report the holders that the agent finds now.

    Args:
        config: Says which manager.
        reading: ``None`` where NVML does not work.
        now: Unix time.
    """
    manager, mapping = config.attribution.workload_manager, config.attribution.job_mapping_dir
    if reading is None:
        return warn(_WORKLOAD_MANAGER, f"{manager}: no holder is known without the driver", "fix the driver first")
    jobs = tenant_source(manager, mapping, config.attribution.proc_root)
    jobs.observe(reading, now)
    if jobs.problem:
        cause, _, fix = jobs.problem.partition("; ")
        return warn(_WORKLOAD_MANAGER, f"{manager}: {cause}", fix)
    count = len(jobs.latest.containers) if jobs.latest else 0
    how = f"by the mapping in {mapping}" if manager == "slurm" and mapping else "by their processes"
    idle = "" if manager == "slurm" and mapping else "; a device with a holder and without use counts as free"
    return ok(_WORKLOAD_MANAGER, f"{manager}: {count} hold devices, {how}{idle}")
