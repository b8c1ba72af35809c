# ruff: noqa: ASYNC240 - files of one test, with nothing else in its loop
import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import grpc.aio
import pytest
from agent_support import until

from exporter.errors import AttributionError
from exporter.kube import kubelet as _proto
from exporter.kube import kubelet as socket_probe
from exporter.kube.kubelet import Completeness, KubeletClient, KubeletPoller
from exporter.model.attribution import Allocations, ClaimedDevice, ContainerAllocation, DeviceIds
from gpu_simulator.kubelet import KubeletServer, allocatable_response, list_response
from gpu_simulator.truth import Fault, HolderTruth, NodeTruth

NOW = 1_000_000.0
GPU = "GPU-00000000-0000-4000-8000-000000000000"


def holder(*ids: str, pod: str = "train", resource: str = "nvidia.com/gpu", container: str = "main") -> HolderTruth:
    return HolderTruth(
        namespace="ml",
        pod=pod,
        container=container,
        pod_uid="u",
        device_uuid=GPU,
        resource=resource,
        device_ids=ids,
        share_ratio=1,
        activity_ratio=1,
        started_seconds=0,
    )


class Node:
    """A truth that a test changes."""

    def __init__(self) -> None:
        self.holders: tuple[HolderTruth, ...] = (holder(GPU),)
        self.allocatable: Mapping[str, tuple[str, ...]] = {"nvidia.com/gpu": (GPU,), "cpu.example/x": ("1",)}
        self.others: tuple[tuple[str, str, str], ...] = (("kube-system", "dns", "main"),)
        self.faults: dict[Fault, float] = {}

    def truth(self) -> NodeTruth:
        return NodeTruth(
            at_seconds=0,
            node="n",
            driver_version="580",
            holders=self.holders,
            other_pods=self.others,
            allocatable=self.allocatable,
            faults=dict(self.faults),
        )


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pod-resources" / "kubelet.sock"


@pytest.fixture
async def server(node: Node, path: Path) -> AsyncIterator[KubeletServer]:
    kubelet = KubeletServer(path, node.truth)
    await kubelet.start()
    yield kubelet
    await kubelet.stop()


@pytest.fixture
def client(path: Path) -> KubeletClient:
    return KubeletClient(str(path), deadline_seconds=10.0)


async def failure(client: KubeletClient) -> AttributionError:
    with pytest.raises(AttributionError) as caught:
        await client.fetch(NOW)
    assert "\n" not in str(caught.value)
    return caught.value


@contextlib.contextmanager
def user(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.usefixtures("server")
async def test_only_containers_with_gpus_are_kept(client: KubeletClient, node: Node) -> None:
    node.holders = (holder(GPU), holder("nic-1", pod="net", resource="nic.example.com/vf"))
    answer = await client.fetch(NOW)
    gpus = DeviceIds(resource="nvidia.com/gpu", ids=(GPU,))
    assert answer.answered_at_seconds == NOW
    assert answer.containers == (ContainerAllocation(namespace="ml", pod="train", container="main", devices=(gpus,)),)
    assert answer.allocatable == (gpus,)


@pytest.mark.usefixtures("server")
async def test_device_entries_per_numa_node_are_merged_per_container(
    client: KubeletClient, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gpu_simulator.kubelet._plain_ids", lambda holders: [(one.resource, one.device_ids) for one in holders]
    )
    node.holders = (holder(GPU), holder(GPU.replace("8000", "8001")))
    (container,) = (await client.fetch(NOW)).containers
    assert container.devices == (DeviceIds(resource="nvidia.com/gpu", ids=(GPU, GPU.replace("8000", "8001"))),)


@pytest.mark.usefixtures("server")
async def test_resource_names_are_matched_by_pattern(path: Path, node: Node) -> None:
    names = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-1g.10gb.me")
    node.holders = tuple(
        holder(f"id-{name}", resource=name) for name in (*names, "example.com/gpu-a", "x.nvidia.com/gpu")
    )
    for patterns, expected in (
        (None, names),
        (("example.com/gpu-*",), ("example.com/gpu-a",)),
        (("nvidia.com/gpu",), ("nvidia.com/gpu",)),
    ):
        client = KubeletClient(str(path)) if patterns is None else KubeletClient(str(path), resources=patterns)
        (container,) = (await client.fetch(NOW)).containers
        assert tuple(devices.resource for devices in container.devices) == expected


@pytest.mark.usefixtures("server")
async def test_claims_of_other_drivers_are_dropped(client: KubeletClient, node: Node) -> None:
    ids = ("dra:gpu.nvidia.com/n/gpu-0", "dra:gpu.nvidia.com/n/gpu-1#s1", "dra:compute-domain.nvidia.com/n/channel-0")
    node.holders = (holder(*ids, resource="dra:my-claim"),)
    (container,) = (await client.fetch(NOW)).containers
    assert container.devices == ()
    first, second = container.claims
    assert first == ClaimedDevice(
        claim_name="my-claim",
        claim_namespace="ml",
        driver="gpu.nvidia.com",
        pool="n",
        device="gpu-0",
        share_id=None,
        cdi_names=first.cdi_names,
    )
    assert (second.device, second.share_id) == ("gpu-1", "s1")
    assert second.cdi_names[:1] == first.cdi_names
    assert len(second.cdi_names) == 2


@pytest.mark.usefixtures("server")
async def test_containers_without_devices_are_listed_separately(client: KubeletClient, node: Node) -> None:
    node.holders = (holder(GPU), holder("dra:compute-domain.nvidia.com/n/channel-0", pod="net", resource="dra:c"))
    answer = await client.fetch(NOW)
    assert [container.pod for container in answer.containers] == ["train"]
    assert set(answer.other_containers) == {("ml", "net", "main"), ("kube-system", "dns", "main")}


@pytest.mark.usefixtures("server")
async def test_one_id_per_gpu_is_kept_for_mebibyte_resources_and_all_ids_for_others(path: Path, node: Node) -> None:
    per_mebibyte = tuple(f"{GPU}-memory-{number}" for number in range(88_000))
    numbered = tuple(f"{GPU}-{number}" for number in range(10))
    node.allocatable = {"volcano.sh/vgpu-memory": per_mebibyte, "volcano.sh/vgpu-number": numbered}
    client = KubeletClient(str(path), resources=("volcano.sh/*",))
    answer = await client.fetch(NOW)
    assert answer.allocatable is not None
    kept = {devices.resource: devices.ids for devices in answer.allocatable}
    assert kept == {"volcano.sh/vgpu-memory": per_mebibyte[:1], "volcano.sh/vgpu-number": numbered}


def test_protobuf_messages_decode_hand_encoded_bytes() -> None:
    devices = b"\x0a\x0envidia.com/gpu\x12\x05GPU-0\x12\x05GPU-1"
    container = b"\x0a\x01c\x12" + bytes([len(devices)]) + devices + b"\x18\x07\xfa\x07\x01?"
    pod = b"\x0a\x03pod\x12\x02ns\x1a" + bytes([len(container)]) + container
    answer = _proto.build_messages()["ListPodResourcesResponse"].FromString(b"\x0a" + bytes([len(pod)]) + pod)
    assert '"GPU-1"' in str(answer)
    assert 'namespace: "ns"' in str(answer)


async def test_missing_socket_is_reported_with_its_fix(client: KubeletClient, path: Path) -> None:
    error = await failure(client)
    assert error.reason == "no_socket"
    assert "mount the directory" in str(error)
    path.parent.mkdir()
    assert "start the kubelet" in str(await failure(client))


async def test_regular_file_at_the_socket_path_is_reported(client: KubeletClient, path: Path) -> None:
    path.parent.mkdir()
    path.write_text("")
    assert (await failure(client)).reason == "not_a_socket"


async def test_socket_without_listener_is_reported(client: KubeletClient, path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    assert (await failure(client)).reason == "refused"


async def test_socket_path_that_is_too_long_is_reported(tmp_path: Path) -> None:
    client = KubeletClient(str(tmp_path / ("x" * 200)))
    error = await failure(client)
    assert error.reason == "bad_path"
    assert "allowed: 107" in str(error)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop its rights")
@pytest.mark.usefixtures("server")
async def test_unreadable_socket_is_reported(path: Path) -> None:
    path.parent.chmod(0o750)
    client = KubeletClient(str(path), deadline_seconds=1.0)
    with user(65534):
        error = await failure(client)
    assert error.reason == "no_permission"
    assert "run as user 0" in str(error)


async def test_server_with_another_protocol_is_reported(path: Path) -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 this is another protocol\r\n")
        writer.close()

    path.parent.mkdir()
    client = KubeletClient(str(path), deadline_seconds=0.3)
    async with await asyncio.start_unix_server(answer, path):
        error = await failure(client)
    assert error.reason == "unavailable"


@pytest.mark.usefixtures("server")
async def test_invalid_kubelet_answer_is_reported_and_recovered(client: KubeletClient, node: Node) -> None:
    node.faults[Fault.KUBELET_GARBAGE] = 0
    assert (await failure(client)).reason == "garbage"
    node.faults.clear()
    assert (await client.fetch(NOW)).containers


@pytest.mark.usefixtures("server")
async def test_silent_kubelet_fails_at_the_deadline(path: Path, node: Node) -> None:
    node.faults[Fault.KUBELET_SILENT] = 0
    client = KubeletClient(str(path), deadline_seconds=0.2)
    async with asyncio.timeout(2):
        error = await failure(client)
    assert error.reason == "deadline"
    assert "0.2 s" in str(error)


async def test_kubelet_with_a_full_connection_queue_is_reported_as_hanging(client: KubeletClient, path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as hung, socket.socket(socket.AF_UNIX) as waiting:
        hung.bind(str(path))
        hung.listen(0)
        waiting.connect(str(path))
        error = await failure(client)
    assert error.reason == "deadline"
    assert "the kubelet hangs" in str(error)


@pytest.mark.usefixtures("server")
async def test_answer_of_5_mb_is_read(client: KubeletClient, node: Node) -> None:
    node.faults[Fault.KUBELET_HUGE] = 5_000_000
    assert [container.pod for container in (await client.fetch(NOW)).containers] == ["train"]


@pytest.mark.usefixtures("server")
async def test_oversized_answer_is_distinct_from_a_rate_limit(client: KubeletClient, node: Node) -> None:
    node.faults[Fault.KUBELET_HUGE] = 0
    error = await failure(client)
    assert error.reason == "too_large"
    assert "32 MiB" in str(error)
    node.faults = {Fault.KUBELET_RATE_LIMIT: 0}
    error = await failure(client)
    assert error.reason == "rate_limited"
    assert "100 calls/s" in str(error)


async def test_kubelet_without_get_allocatable_resources_is_still_read(path: Path) -> None:
    async def empty(_request: bytes, _context: object) -> bytes:
        return b""

    handlers = {"List": grpc.unary_unary_rpc_method_handler(empty)}
    old_kubelet = grpc.aio.server()
    old_kubelet.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_proto.SERVICE, handlers),))
    path.parent.mkdir()
    old_kubelet.add_insecure_port(f"unix:{path}")
    await old_kubelet.start()
    client = KubeletClient(str(path))
    answer = await client.fetch(NOW)
    assert (answer.containers, answer.allocatable) == ((), None)
    assert client.allocatable_error is None
    await old_kubelet.stop(None)


class _Answers:
    """Answers of a kubelet as bytes, and events during an answer; ``None``: the call is refused."""

    def __init__(self, path: Path, *listed: HolderTruth) -> None:
        self.truth = Node()
        self.truth.holders = listed
        self.path, self.changes_socket, self.advertises = path, False, True

    async def list(self, _request: bytes, _context: object) -> bytes:
        if self.changes_socket:
            self.path.chmod(0o600)
        return list_response(self.truth.truth())

    async def advertise(self, _request: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        if not self.advertises:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        return allocatable_response(self.truth.truth())


@contextlib.asynccontextmanager
async def _answering(answers: _Answers) -> AsyncIterator[KubeletPoller]:
    """Run a kubelet with these answers, and yield a poller of it."""
    handlers = {
        "List": grpc.unary_unary_rpc_method_handler(answers.list),
        "GetAllocatableResources": grpc.unary_unary_rpc_method_handler(answers.advertise),
    }
    kubelet = grpc.aio.server()
    kubelet.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_proto.SERVICE, handlers),))
    answers.path.parent.mkdir()
    kubelet.add_insecure_port(f"unix:{answers.path}")
    await kubelet.start()
    yield KubeletPoller(KubeletClient(str(answers.path)), interval_seconds=5, clock=lambda: NOW)
    await kubelet.stop(None)


async def test_advertised_devices_are_kept_and_counted_while_unreadable(path: Path) -> None:
    answers = _Answers(path, holder(GPU))
    async with _answering(answers) as poller:
        await poller.poll()
        assert poller.latest is not None
        before = poller.latest.allocatable
        assert before
        answers.advertises, answers.truth.holders = False, (holder(GPU, pod="next"),)
        await poller.poll()
        assert (pods_of(poller.latest), poller.latest.allocatable) == ({"next"}, before)
        assert poller.errors == {"allocatable_rate_limited": 1}
        assert poller.problem.startswith("advertised devices could not be read again: ")


async def test_pod_end_in_an_answer_with_a_socket_change_needs_confirmation(path: Path) -> None:
    answers = _Answers(path, holder(GPU), holder("GPU-x", pod="other"))
    async with _answering(answers) as poller:
        await poller.poll()
        answers.changes_socket, answers.truth.holders = True, (holder(GPU),)
        await poller.poll()
        assert poller.latest is not None
        assert pods_of(poller.latest) == {"train", "other"}
        assert poller.errors == {"kubelet_starting": 1}
        answers.changes_socket = False
        await poller.poll()
        assert pods_of(poller.latest) == {"train"}


async def test_server_without_the_service_is_reported(path: Path) -> None:
    other = grpc.aio.server()
    path.parent.mkdir()
    other.add_insecure_port(f"unix:{path}")
    await other.start()
    client = KubeletClient(str(path))
    assert (await failure(client)).reason == "unimplemented"
    await other.stop(None)


async def test_restarted_kubelet_is_read_by_the_next_call(server: KubeletServer, client: KubeletClient) -> None:
    await client.fetch(NOW)
    await server.restart()
    assert (await client.fetch(NOW)).containers


async def test_first_call_after_an_outage_succeeds(server: KubeletServer, client: KubeletClient) -> None:
    await client.fetch(NOW)
    await server.stop()
    for _ in range(5):
        assert (await failure(client)).reason == "no_socket"
    await server.start()
    assert (await client.fetch(NOW)).containers


async def test_kubelet_death_during_an_answer_is_reported(
    server: KubeletServer, client: KubeletClient, node: Node
) -> None:
    await client.fetch(NOW)
    node.faults[Fault.KUBELET_SILENT] = 0
    question = asyncio.create_task(failure(client))
    await asyncio.sleep(0.05)
    await server.stop()
    assert (await question).reason in {"no_socket", "unavailable"}


@pytest.mark.usefixtures("server")
async def test_poller_keeps_the_last_good_answer_and_reports_the_failure(path: Path, node: Node) -> None:
    times = iter([NOW, NOW + 5, NOW + 10])
    poller = KubeletPoller(KubeletClient(str(path)), interval_seconds=5, clock=lambda: next(times))
    assert (poller.latest, poller.problem, poller.errors) == (None, "", {})
    await poller.poll()
    good = poller.latest
    assert good is not None
    node.faults[Fault.KUBELET_GARBAGE] = 0
    await poller.poll()
    assert poller.latest is good
    assert "not a pod-resources v1 message" in poller.problem
    assert poller.errors == {"garbage": 1}
    node.faults.clear()
    await poller.poll()
    assert poller.problem == ""
    assert poller.latest is not None
    assert poller.latest.answered_at_seconds == NOW + 10


@pytest.mark.usefixtures("server")
async def test_poller_runs_until_cancelled_and_recovers_with_the_kubelet(path: Path, node: Node) -> None:
    poller = KubeletPoller(KubeletClient(str(path)), interval_seconds=0.05, clock=lambda: NOW)
    task = asyncio.create_task(poller.run())
    await until(lambda: poller.latest is not None)
    node.faults[Fault.KUBELET_DOWN] = 0
    await until(lambda: "no_socket" in poller.errors)
    assert poller.latest is not None
    node.faults.clear()
    node.holders = ()
    await until(lambda: poller.latest is not None and not poller.latest.containers)
    assert poller.problem == ""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


OWN_POD = ("kube-system", "dns")


def pods_of(answer: Allocations) -> set[str]:
    return {container.pod for container in answer.containers}


async def test_empty_answer_after_a_kubelet_restart_is_a_failed_lookup(server: KubeletServer, path: Path) -> None:
    poller = KubeletPoller(KubeletClient(str(path)), interval_seconds=5, clock=lambda: NOW)
    await poller.poll()
    await server.restart(starting_seconds=60.0)
    await poller.poll()
    assert poller.latest is not None
    assert pods_of(poller.latest) == {"train"}
    assert poller.errors == {"kubelet_starting": 1}
    assert "does not know its pods yet" in poller.problem
    await server.restart()
    await poller.poll()
    assert poller.problem == ""


async def test_empty_answer_of_the_same_kubelet_ends_all_holders(server: KubeletServer, path: Path, node: Node) -> None:
    poller = KubeletPoller(KubeletClient(str(path)), interval_seconds=5, clock=lambda: NOW)
    await poller.poll()
    node.holders = node.others = ()
    await poller.poll()
    assert poller.latest is not None
    assert (pods_of(poller.latest), poller.problem) == (set(), "")
    await server.restart()
    await poller.poll()  # before its restart it had no pod either
    assert (poller.latest.containers, poller.problem, poller.errors) == ((), "", {})


async def test_empty_answer_after_a_restart_during_the_call_is_refused() -> None:
    holders = frozenset({("ml", "train", "main")})
    judge = Completeness(None)
    judge.check({("ml", "train")}, holders, None)
    for _ in range(3):
        with pytest.raises(AttributionError, match="does not know its pods yet"):
            judge.check(frozenset(), frozenset(), (1, 1))
    judge.check({("ml", "train")}, holders, (1, 1))
    judge.check(frozenset(), frozenset(), (1, 1))


async def test_empty_first_answer_is_accepted_only_outside_a_pod(
    server: KubeletServer, client: KubeletClient, path: Path
) -> None:
    await server.restart(starting_seconds=60.0)
    assert (await client.fetch(NOW)).containers == ()
    inside = KubeletClient(str(path), canary=OWN_POD)
    assert (await failure(inside)).reason == "kubelet_starting"


@pytest.mark.usefixtures("server")
async def test_an_answer_without_the_own_pod_is_refused_with_the_fix(path: Path, node: Node) -> None:
    inside = KubeletClient(str(path), canary=OWN_POD)
    assert pods_of(await inside.fetch(NOW)) == {"train"}
    node.faults[Fault.KUBELET_PARTIAL] = 0
    while (error := await failure(inside)).reason != "kubelet_starting":  # noqa: ASYNC110 - polling is under test
        await asyncio.sleep(0)  # the kubelet restarts first
    assert error.reason == "kubelet_starting"
    assert "kube-system/dns" in str(error)
    assert "POD_NAMESPACE" in str(error)


@pytest.mark.usefixtures("server")
async def test_an_end_after_an_incomplete_answer_needs_two_answers(path: Path, node: Node) -> None:
    inside = KubeletClient(str(path), canary=OWN_POD)
    await inside.fetch(NOW)
    node.faults[Fault.KUBELET_STARTING] = 0
    while (await failure(inside)).reason != "kubelet_starting":  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)  # the kubelet restarts first
    node.faults.clear()
    node.holders = ()
    assert "confirms" in str(await failure(inside))
    assert pods_of(await inside.fetch(NOW)) == set()


async def test_an_end_after_a_restart_between_two_polls_needs_two_answers(
    server: KubeletServer, client: KubeletClient, node: Node
) -> None:
    await client.fetch(NOW)
    node.holders = (holder(GPU, pod="next"),)
    assert pods_of(await client.fetch(NOW)) == {"next"}  # without a restart one answer is enough
    await server.restart()
    node.holders = (holder(GPU, pod="third"),)
    assert "ml/next" in str(await failure(client))
    node.holders = (holder(GPU, pod="next"),)
    assert pods_of(await client.fetch(NOW)) == {"next"}
    node.holders = ()
    assert pods_of(await client.fetch(NOW)) == set()


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("seconds", "listed"), [(0.0, {"a"}), (1e-9, {"a", "b"})], ids=["lasting", "over"])
async def test_kubelet_server_lists_half_of_its_pods_after_a_restart(
    path: Path, node: Node, seconds: float, listed: set[str]
) -> None:
    poller = KubeletPoller(KubeletClient(str(path)), interval_seconds=5, clock=lambda: NOW)
    node.holders = (holder(GPU, pod="a"), holder(GPU, pod="b"))
    before = socket_probe.identity(str(path))
    node.faults[Fault.KUBELET_PARTIAL] = seconds
    while poller.latest is None:
        await poller.poll()
        await asyncio.sleep(0)  # the kubelet restarts first
    assert pods_of(poller.latest) == listed
    assert socket_probe.identity(str(path)) not in {None, before}


async def test_second_kubelet_restart_requires_two_answers_again(
    server: KubeletServer, client: KubeletClient, node: Node
) -> None:
    await client.fetch(NOW)
    both, node.holders = node.holders, ()
    for _ in range(3):
        await server.restart()
        assert "ml/train" in str(await failure(client))
    node.holders = both
    assert pods_of(await client.fetch(NOW)) == {"train"}


async def test_restarted_kubelet_with_only_static_pods_is_starting(
    server: KubeletServer, path: Path, node: Node
) -> None:
    """A kubelet reads static pods from files; all others come from the API server, which may be down for long."""
    outside = KubeletClient(str(path), node_name="Node-1")
    node.others = (("kube-system", "proxy-node-1", "main"),)
    assert pods_of(await outside.fetch(NOW)) == {"train"}
    holders, node.holders = node.holders, ()
    await server.restart()
    for _ in range(3):
        assert "lists only static pods and listed others" in str(await failure(outside))
    node.holders = holders
    assert pods_of(await outside.fetch(NOW)) == {"train"}
    node.holders = ()
    assert pods_of(await outside.fetch(NOW)) == set()


@pytest.mark.usefixtures("server")
async def test_uuid_ids_of_any_resource_are_kept_and_placeholder_ids_are_not(client: KubeletClient, node: Node) -> None:
    mig = "MIG-00000000-0000-5000-8000-000000000001"
    node.holders = (
        holder(GPU, resource="acme.com/gpu"),
        holder(mig, f"{mig}::1", resource="acme.com/slice"),
        holder(f"{GPU}-3", resource="acme.com/vgpu"),
        holder("nvidia0", resource="smarter-devices/nvidia0"),
    )
    node.allocatable = {"acme.com/gpu": (GPU,), "acme.com/vgpu": (f"{GPU}-3",)}
    answer = await client.fetch(NOW)
    assert answer.containers[0].devices == (
        DeviceIds(resource="acme.com/gpu", ids=(GPU,)),
        DeviceIds(resource="acme.com/slice", ids=(mig, f"{mig}::1")),
    )
    assert answer.allocatable == (DeviceIds(resource="acme.com/gpu", ids=(GPU,)),)
