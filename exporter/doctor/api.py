"""Checks of the Kubernetes API: settings, way to it, each right that the agent needs, token and clock."""

import base64
import contextlib
import json
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from email.utils import parsedate_to_datetime
from typing import Any

from exporter.attribution.api_client import METADATA_LIST, METADATA_WATCH, ApiClient
from exporter.attribution.api_credentials import Credentials
from exporter.attribution.device_ids import GPU_DRA_DRIVER
from exporter.attribution.dra_reader import GROUP_PATH
from exporter.attribution.evidence import Evidence
from exporter.attribution.metadata import NAME_NODE, UNFINISHED
from exporter.attribution.podresources import own_pod
from exporter.config import AgentConfig
from exporter.doctor import api_view
from exporter.doctor.api_view import ApiView
from exporter.doctor.finding import Finding, fail, ok, warn
from exporter.errors import ApiError
from exporter.model import Allocations, ClaimedDevice

NAME, RIGHTS = "kubernetes API", "API rights"
_TIMEOUT_SECONDS = 10.0
_WATCH_SECONDS = 1.0
_SKEW_SECONDS = 10.0
"""Opt-outs and tokens end by the clock; less than this matters to nobody."""
_NO_MEND = ""
_NAMESPACES, _NODES = "get namespaces", "get nodes"


def off() -> Finding:
    """Say what an agent that does not ask the API does without."""
    cost = (
        "off: owners are namespaces, without workload and team; instance type and region come from options; claims "
        "(DRA) are taken at the kubelet's word, and fractions of HAMi, volcano-vgpu and KAI cannot be told"
    )
    return ok(NAME, f"{cost}; --kube-metadata on changes that")


async def ask(
    config: AgentConfig,
    allocations: Allocations | None,
    holders_of: Callable[[Evidence], Collection[tuple[str, str]]],
    *,
    clock: Callable[[], float],
) -> tuple[list[Finding], ApiView | None]:
    """Findings on API and rights, and what the API says; ``None`` where it cannot be had.

    Args:
        config: Of the agent.
        allocations: The kubelet's answer, which says whether claims and which namespaces are asked for.
        holders_of: Namespace and name of the pods that hold devices by what is known.
        clock: Unix time.
    """
    client = ApiClient(config.kubeconfig, random=random.random)
    try:
        try:
            pods = await client.get(
                "/api/v1/pods",
                {"fieldSelector": f"spec.nodeName={config.node_name},{UNFINISHED}", "resourceVersion": "0"},
                accept=METADATA_LIST,
                timeout_seconds=_TIMEOUT_SECONDS,
            )
        except ApiError as error:
            return [fail(NAME, str(error), _NO_MEND), *await _token_findings(config, clock())], None
        found = [await _reached(config, client, pods), *_clock_findings(client.date, clock())]
        found += [await _rights(config, client, allocations), *await _token_findings(config, clock())]
    finally:
        await client.close()
    return found, await api_view.read(config, allocations, holders_of, clock)


async def _reached(config: AgentConfig, client: ApiClient, pods: dict[str, Any]) -> Finding:
    """Judge whether the list is of this node: it has this agent's pod, or the API knows a node of this name."""
    names = {(one["metadata"].get("namespace"), one["metadata"].get("name")) for one in pods.get("items") or ()}
    told = f"{client.address}: {len(names)} pods of node {config.node_name}"
    own = own_pod()
    if own and own not in names:
        wrong = (
            f"{told}, without {'/'.join(own)}, the pod of this agent: {config.node_name!r} is the value of --node-name"
        )
        return fail(NAME, wrong, NAME_NODE)
    if names:
        return ok(NAME, told)
    try:
        await client.get(f"/api/v1/nodes/{config.node_name}", timeout_seconds=_TIMEOUT_SECONDS)
    except ApiError as error:
        if error.reason == "not_found":
            wrong = f"{client.address} has no node {config.node_name!r}, the value of --node-name"
            return fail(NAME, wrong, NAME_NODE)
    return warn(NAME, told, NAME_NODE)


async def _rights(config: AgentConfig, client: ApiClient, allocations: Allocations | None) -> Finding:
    """Try everything that the agent will ask for; a list of pods is granted already."""
    missing: list[str] = []
    granted = ["list pods"]

    async def attempt(name: str, attempted: Awaitable[object]) -> None:
        try:
            await attempted
        except ApiError as error:
            # Who may not ask is refused, whether the namespace is there or not.
            if error.reason == "not_found" and name in {_NAMESPACES, _NODES}:
                granted.append(name)
            else:
                missing.append(str(error))
        else:
            granted.append(name)

    on_node = {"fieldSelector": f"spec.nodeName={config.node_name}"}
    await attempt("watch pods", _watch(client, "/api/v1/pods", {**on_node, "resourceVersion": "0"}))
    await attempt(_NODES, client.get(f"/api/v1/nodes/{config.node_name}", timeout_seconds=_TIMEOUT_SECONDS))
    containers = allocations.containers if allocations else ()
    if config.namespace_teams:
        namespace = next((one.namespace for one in containers if one.namespace), "default")
        path = f"/api/v1/namespaces/{namespace}"
        await attempt(_NAMESPACES, client.get(path, timeout_seconds=_TIMEOUT_SECONDS))
    claim = next((one for of in containers for one in of.claims if one.driver == GPU_DRA_DRIVER), None)
    if claim:
        await _claim_rights(config, client, claim, attempt)
    if missing:
        return warn(RIGHTS, "; ".join(missing), _NO_MEND)
    return ok(RIGHTS, ", ".join(granted))


async def _claim_rights(
    config: AgentConfig,
    client: ApiClient,
    claim: ClaimedDevice,
    attempt: Callable[[str, Awaitable[object]], Awaitable[None]],
) -> None:
    try:
        group = await client.get(GROUP_PATH, timeout_seconds=_TIMEOUT_SECONDS)
        version = str(group["preferredVersion"]["version"])
    except (ApiError, LookupError, TypeError):
        version = "v1"
    slices = {"fieldSelector": f"spec.nodeName={config.node_name},spec.driver={GPU_DRA_DRIVER}", "resourceVersion": "0"}
    path = f"{GROUP_PATH}/{version}/resourceslices"
    await attempt("list resourceslices", client.get(path, slices, timeout_seconds=_TIMEOUT_SECONDS))
    await attempt("watch resourceslices", _watch(client, path, slices))
    path = f"{GROUP_PATH}/{version}/namespaces/{claim.claim_namespace}/resourceclaims/{claim.claim_name}"
    await attempt("get resourceclaims", client.get(path, timeout_seconds=_TIMEOUT_SECONDS))


async def _watch(client: ApiClient, path: str, query: dict[str, str]) -> None:
    """Open a watch that the server ends at once, and leave it with the first word."""
    query = {**query, "timeoutSeconds": f"{_WATCH_SECONDS:.0f}"}
    events = client.watch(path, query, accept=METADATA_WATCH, silence_seconds=_TIMEOUT_SECONDS)
    async with aclosing(events):
        async for _ in events:
            return


def _clock_findings(date: str, now: float) -> list[Finding]:
    try:
        skew = now - parsedate_to_datetime(date).timestamp()
    except ValueError:
        return []
    if abs(skew) <= _SKEW_SECONDS:
        return []
    way = "ahead of" if skew > 0 else "behind"
    told = f"this node is {abs(skew):.0f} s {way} the API server"
    return [warn("API clock", f"{told}: opt-outs and tokens end at the wrong time", "see why: chronyc tracking")]


async def _token_findings(config: AgentConfig, now: float) -> list[Finding]:
    """When the token ends, if it tells; one that is renewed in its file is read again by itself."""
    with contextlib.suppress(ApiError):
        settings = await Credentials(config.kubeconfig).read()
        ends = token_ends_seconds(await settings.authorization())
        if ends is not None and ends <= now:
            mend = "have it renewed (a projected service-account token renews itself), and see this node's clock"
            return [warn("API token", f"ended {(now - ends) / 60:.0f} min ago by this node's clock", mend)]
        if ends is not None:
            return [ok("API token", f"ends in {(ends - now) / 60:.0f} min; its file is read again before")]
    return []


def token_ends_seconds(token: str) -> float | None:
    """Unix time at which a JSON web token ends; ``None`` for other tokens and those that do not tell."""
    parts = token.rpartition(" ")[2].split(".")
    if len(parts) != 3:  # noqa: PLR2004 - header, claims, signature
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return None
    ends = claims.get("exp") if isinstance(claims, dict) else None
    return float(ends) if isinstance(ends, int | float) and not isinstance(ends, bool) else None
