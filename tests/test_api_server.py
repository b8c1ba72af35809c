import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from api_support import NODE, PODS, World, pod, until

from exporter.kube.api_client import METADATA_LIST, METADATA_WATCH
from gpu_simulator.api_server import HISTORY_LENGTH, ApiObjects, Store
from gpu_simulator.truth import Fault

SLICES = "/apis/resource.k8s.io/v1beta1/resourceslices"
CLAIM = "/apis/resource.k8s.io/v1beta1/namespaces/ml/resourceclaims/c"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with World(tmp_path) as made:
        made.objects = ApiObjects(
            pods=(pod("a"), pod("done", phase="Succeeded"), pod("elsewhere", node="other")),
            namespaces=({"metadata": {"name": "ml", "labels": {"team": "x"}}},),
            node={"metadata": {"name": NODE}},
            resource_slices=(
                {"metadata": {"name": "s"}, "spec": {"driver": "gpu.nvidia.com", "nodeName": NODE}},
                {"metadata": {"name": "t"}, "spec": {"driver": "other", "nodeName": NODE}},
            ),
            resource_claims=({"metadata": {"namespace": "ml", "name": "c", "uid": "u"}},),
            dra_version="v1beta1",
        )
        yield made


@asynccontextmanager
async def session(world: World) -> AsyncIterator[aiohttp.ClientSession]:
    token = world.token_file.read_text(encoding="utf-8").strip()
    headers = {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(world.server.url, headers=headers, timeout=timeout) as opened:
        yield opened


async def got(world: World, path: str, accept: str = "", **query: str) -> tuple[int, Any]:
    async with session(world) as opened, opened.get(path, params=query, headers={"Accept": accept}) as answer:
        return answer.status, await answer.json()


async def names(world: World, path: str, selector: str) -> list[str]:
    _, listed = await got(world, path, fieldSelector=selector)
    return [item["metadata"]["name"] for item in listed["items"]]


async def test_lists_are_filtered_by_field_selector(world: World) -> None:
    assert await names(world, PODS, "") == ["a", "done", "elsewhere"]
    assert await names(world, PODS, f"spec.nodeName={NODE}") == ["a", "done"]
    assert await names(world, PODS, f"spec.nodeName=={NODE},status.phase!=Succeeded") == ["a"]
    assert await names(world, SLICES, f"spec.driver=gpu.nvidia.com,spec.nodeName={NODE}") == ["s"]


@pytest.mark.parametrize("selector", ["spec.colour=red", "nonsense", "spec.driver=x"])
async def test_unsupported_field_selector_is_refused(world: World, selector: str) -> None:
    assert (await got(world, PODS, fieldSelector=selector))[0] == 400


async def test_list_is_returned_whole_or_as_metadata(world: World) -> None:
    _, whole = await got(world, PODS)
    _, metadata = await got(world, PODS, METADATA_LIST)
    assert (whole["kind"], metadata["kind"]) == ("PodList", "PartialObjectMetadataList")
    assert set(whole["items"][0]) == {"metadata", "spec", "status"}
    assert set(metadata["items"][0]) == {"kind", "apiVersion", "metadata"}
    assert metadata["items"][0]["metadata"]["resourceVersion"]


@pytest.mark.parametrize("path", [f"/api/v1/nodes/{NODE}", "/api/v1/namespaces/ml", CLAIM, "/apis/resource.k8s.io"])
async def test_single_objects_can_be_read(world: World, path: str) -> None:
    assert (await got(world, path))[0] == 200


MISSING = ("/api/v1/nodes/x", "/api/v1/namespaces/x", CLAIM.replace("v1beta1", "v1"), SLICES.replace("v1beta1", "v1"))


@pytest.mark.parametrize("path", MISSING)
async def test_missing_object_or_version_is_not_found(world: World, path: str) -> None:
    status, body = await got(world, path)
    assert (status, body["kind"], body["code"]) == (404, "Status", 404)


async def test_cluster_without_dra_serves_no_dra_resources(world: World) -> None:
    world.put(pod("a"))
    assert [(await got(world, path))[0] for path in (SLICES, CLAIM, "/apis/resource.k8s.io")] == [404, 404, 404]


async def test_request_without_the_token_is_refused_and_counted(world: World) -> None:
    async with aiohttp.ClientSession(world.server.url) as opened:
        async with opened.get(PODS) as answer:
            assert answer.status == 401
        async with opened.get(PODS, headers={"Authorization": "Bearer wrong"}) as answer:
            assert answer.status == 401
    assert (world.server.without_token, world.server.requests["list pods"]) == (1, 2)


async def test_unauthorised_fault_rotates_the_token_file_once(world: World) -> None:
    before = world.token_file.read_text(encoding="utf-8")
    world.faults = {Fault.API_UNAUTHORISED: 0}
    await until(lambda: world.token_file.read_text(encoding="utf-8") != before, "a new token")
    async with session(world) as opened:
        await asyncio.sleep(0.25)
        async with opened.get(PODS) as answer:
            assert answer.status == 200


async def watched(world: World, seconds: int = 1, **query: str) -> list[tuple[str, str]]:
    found = []
    async with session(world) as opened:
        params = {"watch": "1", "timeoutSeconds": str(seconds), **query}
        async with opened.get(PODS, params=params, headers={"Accept": METADATA_WATCH}) as answer:
            async for line in answer.content:
                event = json.loads(line)
                found.append((event["type"], event["object"].get("metadata", {}).get("name", "")))
    return found


async def test_watch_without_a_version_starts_with_all_objects_and_times_out(world: World) -> None:
    assert await watched(world, fieldSelector=f"spec.nodeName={NODE}") == [("ADDED", "a"), ("ADDED", "done")]


async def test_watch_reports_objects_that_enter_or_leave_the_selection(world: World) -> None:
    _, listed = await got(world, PODS)
    world.put(pod("a", phase="Failed"), pod("b"), pod("elsewhere", labels={"x": "y"}, node="other"))
    await got(world, PODS)
    selector = f"spec.nodeName={NODE},status.phase!=Failed"
    version = listed["metadata"]["resourceVersion"]
    found = await watched(world, fieldSelector=selector, resourceVersion=version)
    assert found == [("DELETED", "done"), ("DELETED", "a"), ("ADDED", "b")]


async def test_bookmarks_follow_changes_and_are_sent_only_on_request(world: World) -> None:
    _, listed = await got(world, PODS)
    version = listed["metadata"]["resourceVersion"]
    assert await watched(world, resourceVersion=version, allowWatchBookmarks="true") == []
    world.put(pod("a"), pod("b"))
    await got(world, PODS)
    reported = await watched(world, resourceVersion=version, allowWatchBookmarks="true")
    assert reported[-1] == ("BOOKMARK", "")
    assert ("BOOKMARK", "") not in await watched(world, resourceVersion=version)


async def test_version_older_than_the_history_is_gone(world: World) -> None:
    await world.server.restart()
    status, body = await got(world, PODS, watch="1", resourceVersion="1001")
    assert (status, body["code"], body["reason"]) == (410, 410, "Expired")


async def test_api_down_fault_closes_the_port_and_reopens_the_same_port(world: World) -> None:
    url = world.server.url
    world.faults = {Fault.API_DOWN: 0}

    async def answers() -> bool:
        try:
            return (await got(world, PODS))[0] == 200
        except aiohttp.ClientError:
            return False

    for wanted in (False, True):
        for _ in range(500):
            if await answers() is wanted:
                break
            await asyncio.sleep(0.01)
        assert await answers() is wanted
        world.faults = {}
    assert world.server.url == url


def test_history_is_bounded_and_keeps_the_oldest_version_for_a_watch() -> None:
    store = Store()
    for number in range(HISTORY_LENGTH + 50):
        store.follow(ApiObjects(pods=(pod("a", labels={"n": str(number)}),)))
    assert len(list(store.changes("pods", 0))) == HISTORY_LENGTH
    assert store.oldest == next(store.changes("pods", 0)).version - 1


def test_equal_objects_are_no_change() -> None:
    store, objects = Store(), ApiObjects(pods=(pod("a"),))
    assert [store.follow(each) for each in (objects, objects, ApiObjects(pods=(pod("a"),)))] == [True, False, False]
