"""The simulated host engine behaves like a real one of 4.6.0, through the binding of the source."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from exporter.errors import ConfigError
from exporter.gpu.dcgm import library as abi
from exporter.gpu.dcgm import library as libdcgm
from exporter.model.fields import Field
from gpu_simulator import dcgm, scenario, scenario_file
from gpu_simulator.truth import Fault, NodeTruth

EPOCH = 1_800_000_000.0
BLANK, BLANK_DOUBLE = 0x7FFFFFFFFFFFFFF0, 2.0**47
HERE = b"localhost:5555"
HOPPER = "node: n1\ngpus: [{model: h100}, {model: h100, mig: [3g.40gb, 1g.10gb]}]\n"
PODS = """
pods:
  - {namespace: ml, name: whole, devices: [{gpu: 0}], activity: 0.8, memory_mib: 4096, start: -100}
  - {namespace: ml, name: part, devices: [{gpu: 1, mig: 0}], activity: 0.5, memory_mib: 2048, start: -100}
"""
GPUS, INSTANCES = [(abi.GPU, 0), (abi.GPU, 1)], [(abi.GPU_INSTANCE, 8), (abi.COMPUTE_INSTANCE, 8)]


@dataclass
class Client:
    """One connection, and its queries."""

    library: libdcgm.Library
    handle: abi.Handle = field(default_factory=abi.Handle)

    def connect(self, address: bytes = HERE, *, timeout_ms: int = 1000) -> int:
        self.library.call("dcgmInit")
        params = abi.ConnectV2Params(version=abi.version_word(abi.ConnectV2Params), timeoutMs=timeout_ms)
        return self.library.call("dcgmConnect_v2", address, ctypes.byref(params), ctypes.byref(self.handle))

    def call(self, name: str, *arguments: object) -> int:
        return self.library.call(name, self.handle, *arguments)

    def group(self, entities: Sequence[tuple[int, int]]) -> abi.Handle:
        made = abi.Handle()
        assert self.call("dcgmGroupCreate", abi.EMPTY_GROUP, b"g", ctypes.byref(made)) == 0
        for entity in entities:
            assert self.call("dcgmGroupAddEntity", made, *entity) == 0
        return made

    def fields(self, ids: Sequence[int], name: bytes = b"f") -> tuple[int, abi.Handle]:
        made = abi.Handle()
        array = (ctypes.c_ushort * len(ids))(*ids)
        return self.call("dcgmFieldGroupCreate", len(ids), array, name, ctypes.byref(made)), made

    def watch(
        self, entities: Sequence[tuple[int, int]], ids: Sequence[int], *, seconds: float = 1.0, keep: int = 1
    ) -> tuple[int, abi.Handle, abi.Handle]:
        group = self.group(entities)
        code, fields = self.fields(ids, name=str(ids).encode())
        assert code == 0
        return self.call("dcgmWatchFields", group, fields, round(seconds * 1e6), 0.0, keep), group, fields

    def latest(self, group: abi.Handle, fields: abi.Handle) -> dict[tuple[int, int, int], libdcgm.Record]:
        reported: dict[tuple[int, int, int], libdcgm.Record] = {}
        collect = abi.CALLBACK(_into(reported.setdefault))
        assert self.call("dcgmGetLatestValues_v2", group, fields, collect, None) == 0
        return reported

    def since(self, group: abi.Handle, fields: abi.Handle, start: int) -> tuple[list[tuple[int, int]], int]:
        reported: list[tuple[int, int]] = []
        following = ctypes.c_int64()

        def keep(_key: object, one: libdcgm.Record) -> None:
            reported.append((one.at_microseconds, int(one.value)))

        collect = abi.CALLBACK(_into(keep))
        assert self.call("dcgmGetValuesSince_v2", group, fields, start, ctypes.byref(following), collect, None) == 0
        return reported, following.value

    def live(self, entities: Sequence[tuple[int, int]], ids: Sequence[int], *, flags: int = abi.LIVE) -> list[object]:
        values = (abi.FieldValueV2 * (len(entities) * len(ids)))()
        pairs = (abi.EntityPair * len(entities))(*(abi.EntityPair(*one) for one in entities))
        array = (ctypes.c_ushort * len(ids))(*ids)
        code = self.call("dcgmEntitiesGetLatestValues", pairs, len(entities), array, len(ids), flags, values)
        if code:
            return [code]
        kinds = {ord("s"): "str", ord("d"): "dbl"}
        return [one.status or getattr(one.value, kinds.get(one.fieldType, "i64")) for one in values]


def _into(keep: Callable[[tuple[int, int, int], libdcgm.Record], object]) -> Callable[..., int]:
    def collect(group: int, number: int, address: int, count: int, _data: object) -> int:
        for one in libdcgm.records(address, count):
            keep((group, number, one.field_id), one)
        return 0

    return collect


@dataclass
class Node:
    """A scenario in virtual time, with faults set by a test."""

    text: str = HOPPER + PODS
    seconds: float = 100.0
    faults: dict[Fault, float] = field(default_factory=dict)
    slept: float = 0.0
    change: Callable[[NodeTruth], NodeTruth] = lambda truth: truth

    def truth(self) -> NodeTruth:
        loaded = scenario.build(scenario_file.parse(self.text, "s.yaml")).at(self.seconds)
        return replace(self.change(loaded), faults=self.faults)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.seconds += seconds
        if self.slept > 5:
            self.faults.clear()

    def client(self) -> Client:
        dcgm.install(
            self.truth, cache_seconds=0.0, epoch_seconds=EPOCH, monotonic=lambda: self.seconds, sleep=self.sleep
        )
        return Client(libdcgm.load())

    def connected(self) -> Client:
        client = self.client()
        assert client.connect() == 0
        return client


@pytest.fixture(autouse=True)
def _no_library_is_left() -> Iterator[None]:
    yield
    dcgm.uninstall()


def test_engine_listens_only_at_its_address_and_a_closed_port_times_out() -> None:
    node = Node()
    client = node.client()
    assert client.connect(b"elsewhere:5555", timeout_ms=3000) == abi.Code.CONNECTION_LOST
    assert node.slept == 3.0
    assert client.connect(b"localhost") == 0
    with pytest.raises(ConnectionRefusedError):
        dcgm.knock("localhost:5556", 1.0)
    with pytest.raises(FileNotFoundError):
        dcgm.knock("unix:///run/nv-hostengine", 1.0)
    dcgm.knock("localhost:5555", 1.0)


def test_engine_reports_its_version() -> None:
    client = Node().connected()
    info = abi.VersionInfo(version=abi.version_word(abi.VersionInfo))
    assert client.call("dcgmHostengineVersionInfo", ctypes.byref(info)) == 0
    assert info.rawBuildInfoString.startswith(b"version:4.6.0;")


def test_hierarchy_lists_gpu_instances_each_with_its_compute_instances() -> None:
    client = Node().connected()
    reported = abi.Hierarchy(version=abi.version_word(abi.Hierarchy))
    assert client.call("dcgmGetGpuInstanceHierarchy", ctypes.byref(reported)) == 0
    rows = [
        (
            one.entity.entityGroupId,
            one.entity.entityId,
            one.parent.entityGroupId,
            one.parent.entityId,
            one.nvmlInstanceId,
        )
        for one in reported.entityList[: reported.count]
    ]
    assert rows == [(4, 8, 1, 1, 2), (5, 8, 4, 8, 2), (4, 9, 1, 1, 7), (5, 9, 4, 9, 7)]
    assert reported.entityList[0].nvmlComputeInstanceId == 0xFFFFFFFF
    assert [one.nvmlProfileSlices for one in reported.entityList[:3]] == [3, 3, 1]


def test_profiling_field_is_blank_at_first_and_then_the_interval_mean() -> None:
    text = HOPPER + PODS.replace("activity: 0.8", "activity: {square: {high: 1.0, low: 0.0, period: 2, duty: 0.25}}")
    node = Node(text)
    client = node.connected()
    _, group, fields = client.watch(GPUS[:1], [Field.PROF_GR_ENGINE_ACTIVE])
    assert client.call("dcgmUpdateAllFields", 1) == 0
    assert client.latest(group, fields)[1, 0, 1001].value == BLANK_DOUBLE
    before = node.truth().gpus[0].load_integral.engine
    node.seconds += 1.0
    mean = node.truth().gpus[0].load_integral.engine - before
    assert mean == pytest.approx(0.5)
    assert client.latest(group, fields)[1, 0, 1001].value == pytest.approx(mean)


def test_instance_has_its_own_memory_name_and_engines_and_the_gpu_board() -> None:
    node = Node()
    client = node.connected()
    ids = [50, 54, Field.FB_TOTAL, Field.GPU_TEMP, 1001, 1005, 1009]
    _, group, fields = client.watch(INSTANCES, ids)
    node.seconds += 1.0
    reported = client.latest(group, fields)
    gpu = node.truth().gpus[1]
    for level in (abi.GPU_INSTANCE, abi.COMPUTE_INSTANCE):
        assert reported[level, 8, 50].value == b"3g.40gb"
        assert reported[level, 8, 54].value == gpu.instances[0].uuid.encode()
        assert reported[level, 8, Field.FB_TOTAL].value == gpu.instances[0].memory_bytes // 2**20
        assert reported[level, 8, Field.GPU_TEMP].value == gpu.gpu_temp_celsius
        assert reported[level, 8, 1001].value == pytest.approx(gpu.instances[0].load.engine)
        assert reported[level, 8, 1009].value == BLANK
    assert reported[abi.GPU_INSTANCE, 8, 1005].value == pytest.approx(gpu.instances[0].load.dram)
    assert reported[abi.COMPUTE_INSTANCE, 8, 1005].value == BLANK_DOUBLE


def test_live_read_polls_the_driver_and_a_profiling_field_kills_the_engine() -> None:
    client = Node().connected()
    assert client.live(GPUS, [Field.GPU_UTIL]) == [80, BLANK + 2]
    assert client.live([(abi.NONE, 0)], [Field.DRIVER_VERSION]) == [b"590.48.01"]
    assert client.live(GPUS, [Field.XID_ERRORS]) == [abi.Code.ERROR]
    with pytest.raises(dcgm.EngineKilledError):
        client.live(GPUS, [Field.PROF_GR_ENGINE_ACTIVE])
    assert client.live(GPUS, [Field.GPU_UTIL]) == [abi.Code.CONNECTION_LOST]


def test_restarted_engine_loses_all_groups_and_old_connections_stay_dead() -> None:
    node = Node()
    client = node.connected()
    _, group, _ = client.watch(GPUS, [150])
    node.faults = {Fault.ENGINE_DOWN: 0.0}
    assert client.call("dcgmGroupDestroy", group) == abi.Code.CONNECTION_LOST
    with pytest.raises(ConnectionRefusedError):
        dcgm.knock("localhost:5555", 1.0)
    node.faults = {}
    assert client.call("dcgmGroupDestroy", group) == abi.Code.CONNECTION_LOST
    assert client.call("dcgmDisconnect") == 0
    again = Client(client.library)
    assert again.connect() == 0
    assert dcgm.held()["groups"] == 0


def test_hanging_engine_calls_return_on_resume_and_slow_engine_delays() -> None:
    node = Node()
    client = node.connected()
    node.faults = {Fault.ENGINE_SLOW: 0.25}
    assert client.live(GPUS, [52]) == [0, 1]
    assert node.slept == 0.25
    node.faults = {Fault.ENGINE_HANG: 0.0}
    assert client.live(GPUS, [52]) == [0, 1]
    assert node.slept > 5


def _with_fault(fault: Fault) -> Callable[[NodeTruth], NodeTruth]:
    return lambda truth: replace(truth, gpus=(replace(truth.gpus[0], fault=fault), *truth.gpus[1:]))


@pytest.mark.parametrize(("fault", "status"), [(Fault.GPU_LOST, 4), (Fault.RESET_REQUIRED, 1), (Fault.GPU_ABSENT, 7)])
def test_faulty_gpu_keeps_its_name_and_has_blank_measurements(fault: Fault, status: int) -> None:
    node = Node()
    client = node.connected()
    node.change = _with_fault(fault)
    reported = ctypes.c_int()
    assert client.call("dcgmGetGpuStatus", 0, ctypes.byref(reported)) == 0
    assert reported.value == status
    uuid = node.truth().gpus[0].uuid.encode()
    assert client.live(GPUS[:1], [54, Field.GPU_UTIL, Field.POWER_USAGE]) == [uuid, BLANK, BLANK_DOUBLE]
    count, ids = ctypes.c_int(32), (ctypes.c_uint * 32)()
    client.call("dcgmGetEntityGroupEntities", abi.GPU, ids, ctypes.byref(count), abi.SUPPORTED_ONLY)
    assert count.value == (1 if fault is Fault.GPU_ABSENT else 2)


@pytest.mark.parametrize(
    ("section", "reported"),
    [
        ("dcgm: {version: 2.4.6}", "dcgm.version: is '2.4.6'; allowed: three numbers, from 3.3.0 to 4.99.99"),
        ("dcgm: {version: 4.6}", "dcgm.version: is 4.6; allowed: a text"),
        ("dcgm: {module: true}", "dcgm.module: is not a key here; allowed: version, profiling_module"),
        ("faults: [{kind: engine_slow}]", "faults[0].seconds: is missing; allowed: a number from 0"),
        ("faults: [{kind: engine_down, gpu: 0}]", "has no effect with engine_down, which affects the whole node"),
    ],
)
def test_invalid_dcgm_section_is_reported_with_the_allowed_values(section: str, reported: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario_file.parse(HOPPER + section + "\n", "s.yaml")
    assert reported in str(caught.value)
