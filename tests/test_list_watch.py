import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from api_support import NODE, PODS, SELECTOR, Waits, World, following, pod, pod_list, scripted, stream, uid_of, until
from hypothesis import given
from hypothesis import strategies as st

from exporter.kube.list_watch import GONE_SPREAD_SECONDS, ListWatch, key_of
from gpu_simulator import api_server
from gpu_simulator.api_server import ApiObjects, Store
from gpu_simulator.truth import Fault

A, B, C = ("ml", "a"), ("ml", "b"), ("ml", "c")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with World(tmp_path) as made:
        made.put(pod("a"))
        yield made


def event(kind: str, shown: object) -> bytes:
    return json.dumps({"type": kind, "object": shown}).encode() + b"\n"


def at(name: str, version: int, **changes: str) -> dict[str, Any]:
    return pod(name, resourceVersion=str(version), **changes)


async def test_pods_are_listed_once_and_then_watched(world: World) -> None:
    async with following(world.client) as pods:
        assert (pods.known, pods.at_seconds, dict(pods.items)) == (False, None, {})
        await until(lambda: pods.known, "listed")
        before = pods.items
        world.put(pod("a"), pod("b"), pod("elsewhere", node="other"))
        await until(lambda: B in pods.items, "the new pod")
        assert dict(pods.items) == {A: "uid-of-a", B: "uid-of-b"}
        assert dict(before) == {A: "uid-of-a"}  # a reader's mapping does not change
        assert (pods.problem, pods.errors) == ("", {})
        assert pods.at_seconds == pytest.approx(time.time(), abs=5)
    assert world.server.requests == {"list pods": 1, "watch pods": 1}
    assert (world.server.most_streams, world.server.without_token) == (1, 0)
    await until(lambda: world.server.open_streams == 0, "the stream is closed when the follower ends")


async def test_finished_pod_is_removed_and_a_new_pod_with_its_name_is_added(world: World) -> None:
    async with following(world.client) as pods:
        await until(lambda: pods.known, "listed")
        world.put(pod("a", phase="Succeeded"))
        await until(lambda: A not in pods.items, "gone")
        world.put(pod("a", uid="second"))
        await until(lambda: pods.items.get(A) == "second", "another pod of the name")


async def test_pod_recreated_between_two_checks_has_the_new_uid(world: World) -> None:
    async with following(world.client) as pods:
        await until(lambda: pods.known, "listed")
        world.put(pod("a", uid="second"))
        await until(lambda: pods.items.get(A) == "second", "the new uid")


async def test_change_to_an_unread_field_creates_no_new_version(world: World) -> None:
    async with following(world.client) as pods:
        await until(lambda: pods.known, "listed")
        items, seen = pods.items, pods.at_seconds
        world.put(pod("a", annotations={"noise": "1"}))
        await until(lambda: pods.at_seconds != seen and world.server.open_streams == 1, "the event or a bookmark")
        await until(lambda: pods._newest != "1001", "the event")
        assert pods.items is items


TROUBLE = {
    Fault.API_DOWN: "unreachable",
    Fault.API_SILENT: "timeout",
    Fault.API_CUT: "unreachable",
    Fault.API_SLOW: "",
    Fault.API_GONE: "gone",
    Fault.API_TOO_MANY: "",
    Fault.API_UNAUTHORISED: "",
    Fault.API_FORBIDDEN: "",
    Fault.API_ERROR: "",
}
"""Effect on an open stream; other faults concern new requests."""


@pytest.mark.parametrize(("fault", "reason"), TROUBLE.items())
async def test_map_recovers_after_each_fault_of_an_open_stream(world: World, fault: Fault, reason: str) -> None:
    async with following(world.client, silence_seconds=0.4) as pods:
        await until(lambda: pods.known and world.server.open_streams == 1, "watched")
        world.faults = {fault: 0.05}
        if reason:
            await until(lambda: pods.errors.get(reason, 0) > 0, "the trouble is noticed")
        world.put(pod("b"), pod("c"))
        assert pods.known
        world.faults = {}
        await until(lambda: set(pods.items) == {B, C} and not pods.problem, "the truth")
        assert pods.known
    assert (world.server.most_streams, world.server.without_token) == (1, 0)


AT_START = {
    Fault.API_DOWN: "unreachable",
    Fault.API_GONE: "gone",
    Fault.API_CUT: "unreachable",
    Fault.API_TOO_MANY: "too_many",
    Fault.API_FORBIDDEN: "forbidden",
    Fault.API_ERROR: "server_error",
}


@pytest.mark.parametrize(("fault", "reason"), AT_START.items())
async def test_fault_at_start_is_reported_and_recovered(world: World, fault: Fault, reason: str) -> None:
    world.faults = {fault: 0}
    if fault is Fault.API_DOWN:
        await world.server.restart()
    async with following(world.client) as pods:
        await until(lambda: pods.errors.get(reason, 0) > 1, "noticed twice")
        await until(lambda: bool(pods.problem), "said")
        assert (reason in {"gone", "unreachable"}) or not pods.known
        world.faults = {}
        await until(lambda: dict(pods.items) == {A: "uid-of-a"} and not pods.problem, "the truth")


REFUSALS = {
    Fault.API_SILENT: "timeout",
    Fault.API_TOO_MANY: "too_many",
    Fault.API_FORBIDDEN: "forbidden",
    Fault.API_ERROR: "server_error",
}


@pytest.mark.parametrize(("fault", "reason"), REFUSALS.items())
async def test_known_pods_are_kept_while_a_restarted_server_refuses(world: World, fault: Fault, reason: str) -> None:
    async with following(world.client, silence_seconds=0.2) as pods:
        await until(lambda: pods.known and world.server.open_streams == 1, "watched")
        world.faults = {fault: 0}
        await world.server.restart()
        world.put(pod("b"))
        await until(lambda: pods.errors.get(reason, 0) > 0 and bool(pods.problem), "noticed")
        assert (pods.known, dict(pods.items)) == (True, {A: "uid-of-a"})
        world.faults = {}
        await until(lambda: set(pods.items) == {B} and not pods.problem, "the truth")


async def test_rotated_token_is_reloaded_without_an_error(world: World) -> None:
    async with following(world.client) as pods:
        await until(lambda: pods.known, "listed")
        world.faults = {Fault.API_UNAUTHORISED: 0}
        await asyncio.sleep(0)
        await world.server.restart()  # open streams survive a rotation of the token, so break them
        world.put(pod("b"))
        await until(lambda: set(pods.items) == {B}, "the truth")
        assert "unauthorised" not in pods.errors


async def test_restarted_server_without_history_is_listed_again(world: World) -> None:
    async with following(world.client) as pods:
        await until(lambda: pods.known, "listed")
        await world.server.stop()
        world.put(pod("b"))
        await world.server.restart()
        await until(lambda: set(pods.items) == {B} and not pods.problem, "the truth")
        assert pods.errors["gone"] == 1


async def test_unreachable_server_is_retried_with_exponential_backoff(world: World) -> None:
    waits = Waits()
    async with following(world.client, sleep=waits, random=lambda: 1.0) as pods:
        await until(lambda: pods.known, "listed")
        await world.server.stop()
        await until(lambda: len(waits.seconds) >= 9, "nine attempts")
        assert waits.seconds[:9] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
        assert pods.known
        assert dict(pods.items) == {A: "uid-of-a"}
        assert "list pods" not in pods.problem
        assert "watch pods at http://127.0.0.1" in pods.problem


async def test_backoff_wait_is_random_within_its_whole_range(world: World) -> None:
    waits = Waits()
    await world.server.stop()
    async with following(world.client, sleep=waits, random=lambda: 0.25) as pods:
        await until(lambda: len(waits.seconds) >= 4, "four attempts")
        assert waits.seconds[:4] == [0.25, 0.5, 1, 2]
        assert not pods.known


async def test_retry_after_is_obeyed(world: World) -> None:
    world.faults = {Fault.API_TOO_MANY: 7}
    waits = Waits()
    async with following(world.client, sleep=waits, random=lambda: 0.5) as pods:
        await until(lambda: pods.errors.get("too_many", 0) >= 3, "three refusals")
        assert all(7 <= seconds <= 8 for seconds in waits.seconds)


async def test_missing_watch_right_is_reported_and_the_list_is_polled_slowly(tmp_path: Path) -> None:
    found = [pod("a")]

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return web.json_response(api_server.status(403, "Forbidden", "no"), status=403)
        return pod_list(*found)

    waits = Waits()
    async with scripted(answer, tmp_path) as (client, _), following(client, sleep=waits) as pods:
        await until(lambda: A in pods.items and bool(pods.problem), "listed")
        assert "grant verb watch on resource pods" in pods.problem
        found[:] = [pod("b")]
        await until(lambda: set(pods.items) == {B}, "listed again")
        assert all(seconds >= 45 for seconds in waits.seconds)


async def test_first_gone_lists_from_the_cache_and_later_ones_list_consistently(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await stream(request, [event("ERROR", api_server.expired(1, 2))])
        return pod_list(at("a", 90))

    waits = Waits()
    async with (
        scripted(answer, tmp_path) as (client, requests),
        following(client, sleep=waits, random=lambda: 0.75) as pods,
    ):
        await until(lambda: pods.errors.get("gone", 0) >= 3, "gone three times")
    assert waits.seconds[0] == 0.75 * GONE_SPREAD_SECONDS, "all agents get the error at once"
    lists = [request.query.get("resourceVersion") for request in requests if "watch" not in request.query]
    assert lists[:3] == ["0", "0", None]


async def test_stale_cache_is_not_used(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            first = request.query["resourceVersion"] == "100"
            lines = [event("ADDED", at("b", 120)), event("ERROR", api_server.expired(1, 2))]
            return await stream(request, lines if first else [], hold=not first)
        if "resourceVersion" in request.query:
            return pod_list(at("a", 90), version=100)
        return pod_list(at("a", 90), at("b", 120), version=130)

    async with scripted(answer, tmp_path) as (client, requests), following(client) as pods:
        await until(lambda: len(requests) == 5 and not pods.problem, "list, watch, old list, true list, watch")
        assert set(pods.items) == {A, B}
        assert requests[-1].query["resourceVersion"] == "130"


async def test_bookmark_moves_the_watch_start_and_a_clean_end_does_not_list_again(
    tmp_path: Path,
) -> None:
    bookmark = {"kind": "Pod", "metadata": {"resourceVersion": "170", "creationTimestamp": None}}

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return pod_list(at("a", 90))
        first = request.query["resourceVersion"] == "100"
        return await stream(request, [event("BOOKMARK", bookmark)] if first else [], hold=not first)

    waits = Waits()
    async with scripted(answer, tmp_path) as (client, requests), following(client, sleep=waits) as pods:
        await until(lambda: len(requests) == 3, "watched again")
        assert requests[-1].query["resourceVersion"] == "170"
        assert requests[-1].query["allowWatchBookmarks"] == "true"
        assert (dict(pods.items), waits.seconds, pods.errors) == ({A: "uid-of-a"}, [], {})


async def test_streams_that_end_at_once_are_retried_with_backoff(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream(request, []) if "watch" in request.query else pod_list()

    waits = Waits()
    async with (
        scripted(answer, tmp_path) as (client, _),
        following(client, sleep=waits, random=lambda: 1.0, clock=lambda: 1e9) as pods,
    ):
        await until(lambda: len(waits.seconds) >= 4, "four ends")
        assert waits.seconds[:4] == [1, 2, 4, 8]
        assert set(pods.errors) == {"short_watch", "clock_skew"}


@pytest.mark.parametrize(
    "line",
    [b"<html>\n", b"[]\n", b'{"type":"ADDED"}\n', b'{"type":"ADDED","object":null}\n', b"[" * 100_000 + b"\n"],
)
async def test_invalid_event_is_counted_and_causes_a_new_list(tmp_path: Path, line: bytes) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return pod_list(at("a", 90))
        first = len(requests) == 2
        return await stream(request, [line] if first else [], hold=not first)

    async with scripted(answer, tmp_path) as (client, requests), following(client) as pods:
        await until(lambda: len(requests) == 4 and not pods.problem, "listed and watched again")
        assert pods.errors == {"garbage": 1}
        assert dict(pods.items) == {A: "uid-of-a"}


@pytest.mark.parametrize("body", ["{}", "[]", "null", '{"items": 3}', '{"kind": "Status"}', "<html>", '{"items": []}'])
async def test_invalid_list_is_counted_as_garbage(tmp_path: Path, body: str) -> None:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(text=body, content_type="application/json")

    async with scripted(answer, tmp_path) as (client, _), following(client) as pods:
        await until(lambda: pods.errors.get("garbage", 0) >= 2, "refused twice")
        assert not pods.known


async def test_empty_list_is_a_valid_answer(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await stream(request, [], hold=True)
        return web.json_response({"kind": "PodList", "metadata": {"resourceVersion": "9"}, "items": None})

    async with scripted(answer, tmp_path) as (client, _), following(client) as pods:
        await until(lambda: pods.known, "listed")
        assert dict(pods.items) == {}


async def test_unexpected_parser_error_is_reported_and_recovered(world: World) -> None:
    def parse(shown: dict[str, Any]) -> str:
        return str(1 / (shown["metadata"]["name"] != "b"))

    async with following(world.client, parse=parse) as pods:
        await until(lambda: pods.known, "listed")
        world.put(pod("a"), pod("b"))
        await until(lambda: pods.errors.get("unexpected", 0) >= 3, "met repeatedly")
        assert "ZeroDivisionError" in pods.problem
        assert set(pods.items) == {A}
        world.put(pod("a"), pod("c"))
        await until(lambda: set(pods.items) == {A, C} and not pods.problem, "all is well without it")


async def test_clock_skew_is_reported_once_and_watching_continues(world: World) -> None:
    ahead = SimpleNamespace(seconds=40.0)
    async with following(world.client, clock=lambda: time.time() + ahead.seconds, lifetime_seconds=(1, 1)) as pods:
        await until(lambda: world.server.requests["watch pods"] >= 2, "renewed")
        assert pods.skew_seconds == pytest.approx(40.0, abs=5.0)
        assert (pods.errors, pods.problem, pods.known) == ({"clock_skew": 1}, "", True)
        ahead.seconds = -3600.0
        await until(lambda: pods.skew_seconds < 0, "behind")
        ahead.seconds = 2.0
        await until(lambda: pods.skew_seconds == 0, "well")
        assert pods.errors == {"clock_skew": 1}


async def test_unparsable_object_is_skipped_and_its_known_version_stays(tmp_path: Path) -> None:
    def broken(name: str, version: int) -> dict[str, Any]:
        return {"metadata": {"namespace": "ml", "name": name, "resourceVersion": str(version)}}  # no uid

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return pod_list(at("a", 90), broken("b", 91), None, "text")
        lines = [event("MODIFIED", broken("a", 101)), event("ADDED", at("c", 102)), event("DELETED", broken("c", 103))]
        lines.append(event("ADDED", at("d", 104)))
        return await stream(request, lines, hold=True)

    async with scripted(answer, tmp_path) as (client, _), following(client) as pods:
        await until(lambda: ("ml", "d") in pods.items, "the last event")
        assert dict(pods.items) == {A: "uid-of-a", ("ml", "d"): "uid-of-d"}
        assert pods.errors == {"unparsable": 4}


async def test_proxy_answering_with_whole_pods_is_supported(tmp_path: Path) -> None:
    async with World(tmp_path, metadata_forms=False) as world, following(world.client) as pods:
        world.put(pod("a"))
        await until(lambda: A in pods.items, "listed or watched")
        world.put(pod("a"), pod("b"))
        await until(lambda: B in pods.items, "watched")
        assert pods.errors == {}


async def test_lines_as_long_as_the_largest_object_are_read(world: World) -> None:
    big = {"noise": "x" * 3 * 2**19}
    async with following(world.client, metadata_only=False) as pods:
        await until(lambda: pods.known, "listed")
        world.put(pod("a"), pod("b", annotations=big), pod("c", annotations={"noise": "x" * 70_000}))
        await until(lambda: set(pods.items) == {A, B, C}, "watched")
        assert pods.errors == {}
    async with following(world.client) as pods:
        await until(lambda: set(pods.items) == {A, B, C}, "listed")


async def test_line_longer_than_any_object_causes_a_new_list(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        lists = len([one for one in requests if "watch" not in one.query])
        if "watch" not in request.query:
            return pod_list(at("a" if lists == 1 else "b", 90))
        huge = [b'{"type":"ADDED","object":{"metadata":{"name":"', *[b"x" * 2**16] * 40, b'"}}}\n']
        return await stream(request, huge if lists == 1 else [], hold=True)

    async with scripted(answer, tmp_path) as (client, requests), following(client) as pods:
        await until(lambda: B in pods.items and not pods.problem, "listed again")
        assert pods.errors == {"too_large": 1}


async def test_silent_stream_is_reopened_at_its_last_version(world: World) -> None:
    async with following(world.client, silence_seconds=0.3) as pods:
        await until(lambda: pods.known and world.server.open_streams == 1, "watched")
        world.faults = {Fault.API_SILENT: 0}
        await until(lambda: pods.errors.get("timeout", 0) > 0, "noticed")
        world.faults = {}
        world.put(pod("b"))
        await until(lambda: set(pods.items) == {B}, "the truth")
    assert world.server.requests["list pods"] == 1


async def test_quiet_watch_is_renewed_without_an_error(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream(request, [], hold=True) if "watch" in request.query else pod_list(at("a", 90))

    async with scripted(answer, tmp_path) as (client, requests), following(client, silence_seconds=1.1) as pods:
        await until(lambda: len(requests) >= 4, "two watches renewed")
        assert (pods.errors, pods.problem, pods.known) == ({}, "", True)
    assert ["watch" in request.query for request in requests[:4]] == [False, True, True, True]


async def test_a_list_without_the_canary_is_a_failed_lookup(world: World) -> None:
    options = {"canary": ("ml", "own"), "canary_fix": "set --node-name"}
    async with following(world.client, **options) as pods:
        await until(lambda: "incomplete" in pods.errors, "refused")
        assert (dict(pods.items), pods.known) == ({}, False)
        assert "ml/own, the pod of this agent, is not among the 1 objects; set --node-name" in pods.problem
        world.put(pod("a"), pod("own"))
        await until(lambda: pods.known and not pods.problem, "complete")
        await world.server.stop()
        world.put(pod("b"))
        await world.server.restart()
        await until(lambda: pods.errors["incomplete"] > 1, "listed again")
        assert set(pods.items) == {A, ("ml", "own")}


async def test_a_watch_is_renewed_after_a_random_time_within_its_bounds(world: World) -> None:
    async with following(world.client, lifetime_seconds=(1, 1)) as pods:
        await until(lambda: world.server.requests["watch pods"] >= 3, "renewed twice")
        assert (world.server.requests["list pods"], pods.errors, pods.problem) == (1, {}, "")


async def test_pods_are_unknown_after_keep_seconds_without_a_server(world: World) -> None:
    now = SimpleNamespace(seconds=1e9)
    async with following(world.client, clock=lambda: now.seconds, keep_seconds=300) as pods:
        await until(lambda: pods.known and world.server.open_streams == 1, "watched")
        await world.server.stop()
        await until(lambda: bool(pods.problem), "noticed")
        known = []
        for seconds in (299, 2):
            now.seconds += seconds
            known.append(pods.known)
        assert known == [True, False]
        assert dict(pods.items) == {A: "uid-of-a"}
        await world.server.start()
        await until(lambda: pods.known, "back")


def offline(clock: Callable[[], float] = time.time) -> ListWatch[str]:
    return ListWatch(
        client=None,  # type: ignore[arg-type] # never asked
        path=PODS,
        query=SELECTOR,
        metadata_only=True,
        parse=uid_of,
        clock=clock,
    )


NAMES = st.sampled_from("abc")
STATES = st.dictionaries(NAMES, st.tuples(st.sampled_from(["u1", "u2"]), st.sampled_from(["Running", "Failed"])))


@given(st.lists(STATES, max_size=12))
def test_events_give_the_same_map_as_a_list(states: list[dict[str, tuple[str, str]]]) -> None:
    store, pods = Store(), offline()
    wanted = api_server.selector("pods", SELECTOR["fieldSelector"])
    for state in states:
        version = store.version
        made = tuple(pod(name, uid=uid, phase=phase, node=NODE) for name, (uid, phase) in state.items())
        store.follow(ApiObjects(pods=made))
        for change in store.changes("pods", version):
            if line := api_server.event(change, wanted, metadata_only=True):
                read = json.loads(line)
                pods._apply(read["type"], read["object"])
        listed = [dict(shown) for shown in store.list("pods") if wanted(shown)]
        assert dict(pods.items) == {key_of(shown): uid_of(shown) for shown in listed}
