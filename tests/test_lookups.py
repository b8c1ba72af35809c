"""Lookups of single objects by name: their frequency, and failed ones."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from api_support import Cluster

from exporter.kube.api_client import METADATA_WATCH, ApiClient, Request
from exporter.kube.credentials import Credentials
from exporter.kube.list_watch import PATIENCE_SECONDS, Lookups
from gpu_simulator.api_server import ApiServer
from gpu_simulator.truth import Fault


class Names:
    """Lookups of the labels of namespaces."""

    def __init__(self, cluster: Cluster, server: ApiServer, lookups: Lookups[str, str]) -> None:
        self.cluster = cluster
        self.server = server
        self.lookups = lookups

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10.0
        while not condition():
            assert time.monotonic() < deadline, f"not in time; problem: {self.lookups.problem}"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def looking_up(
    folder: Path, *, renew_seconds: float | None = None, refused_seconds: float = 300.0
) -> AsyncIterator[Names]:
    cluster = Cluster()
    for name in ("a", "b", "c"):
        cluster.add_namespace(name, labels={"team": name})
    server = ApiServer(
        cluster.objects, lambda: cluster.faults, token_file=folder / "token", kubeconfig=folder / "kubeconfig"
    )
    await server.start()
    client = ApiClient(Credentials(kubeconfig=folder / "kubeconfig"), random=lambda: 0.1)
    lookups: Lookups[str, str] = Lookups(
        client=client,
        request=lambda name: Request(f"/api/v1/namespaces/{name}", accept=METADATA_WATCH),
        parse=lambda _name, item: item["metadata"]["labels"].get("team"),
        steady=cluster.clock,
        renew_seconds=renew_seconds,
        refused_seconds=refused_seconds,
    )
    task = asyncio.create_task(lookups.run())
    try:
        yield Names(cluster, server, lookups)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
        await server.stop()


async def test_wanted_object_is_read_once_and_forgotten_when_no_longer_kept(tmp_path: Path) -> None:
    async with looking_up(tmp_path) as names:
        names.lookups.want("a")
        await names.until(lambda: names.lookups.items == {"a": "a"})
        before = names.lookups.items
        names.lookups.keep(["a", "b"])
        await names.until(lambda: names.lookups.items == {"a": "a", "b": "b"})
        assert before == {"a": "a"}, "a reader's mapping does not change"
        names.lookups.keep(["b"])
        assert names.lookups.items == {"b": "b"}
        assert names.server.requests["get namespace"] == 2


async def test_changed_object_is_read_again_after_the_renewal_time(tmp_path: Path) -> None:
    async with looking_up(tmp_path, renew_seconds=0.05) as names:
        names.lookups.want("a")
        await names.until(lambda: names.lookups.items)
        names.cluster.add_namespace("a", labels={"team": "new"})
        await names.until(lambda: names.lookups.items == {"a": "new"})
        del names.cluster.namespaces["a"]
        await names.until(lambda: names.lookups.items == {})
        assert names.lookups.given_up("a")
        assert names.lookups.problem is None
        names.cluster.add_namespace("a", labels={"team": "back"})
        assert names.lookups.errors["not_found"] == 1, "a missing object is not requested at every turn"


async def test_refused_lookup_is_given_up_and_retried_later(tmp_path: Path) -> None:
    async with looking_up(tmp_path, refused_seconds=0.05) as names:
        names.server.forbidden.add("namespace")
        names.lookups.want("a")
        assert not names.lookups.given_up("a")
        await names.until(lambda: names.lookups.given_up("a"))
        assert names.lookups.problem is not None
        assert names.lookups.problem.reason == "forbidden"
        names.server.forbidden.clear()
        await names.until(lambda: names.lookups.items == {"a": "a"})
        assert not names.lookups.given_up("a")
        assert names.lookups.problem is None


async def test_outage_causes_one_request_at_a_time(tmp_path: Path) -> None:
    async with looking_up(tmp_path) as names:
        names.cluster.faults = {Fault.API_ERROR: 0.0}
        names.lookups.keep(["a", "b", "c"])
        await names.until(lambda: names.lookups.problem)
        assert names.server.requests["get namespace"] == 1
        assert not any(names.lookups.given_up(name) for name in "abc")
        names.cluster.now += PATIENCE_SECONDS
        assert all(names.lookups.given_up(name) for name in "abc")
        names.lookups.want("d")
        names.cluster.now += PATIENCE_SECONDS
        assert names.lookups.given_up("d"), "a lookup from the outage has waited as long"
        names.cluster.faults = {}
        await names.until(lambda: len(names.lookups.items) == 3)
        assert names.lookups.problem is None


async def test_object_without_labels_is_read_again_and_given_up_after_the_patience(tmp_path: Path) -> None:
    async with looking_up(tmp_path) as names:
        names.cluster.add_namespace("a", labels={})
        names.lookups.want("a")
        await names.until(lambda: names.server.requests["get namespace"])
        assert not names.lookups.given_up("a")
        names.cluster.now += PATIENCE_SECONDS
        await names.until(lambda: names.lookups.given_up("a"))
        names.cluster.add_namespace("a", labels={"team": "late"})
        await names.until(lambda: names.lookups.items == {"a": "late"})
