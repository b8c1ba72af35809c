"""The binding of libdcgm on a real shared library and a real engine process: layouts, values, codes, faults."""

import ctypes
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref
from pathlib import Path

import dcgm_stub_support as stub
import pytest

from exporter.errors import SourceError
from exporter.gpu.dcgm import library as abi
from exporter.gpu.dcgm import library as libdcgm
from exporter.gpu.dcgm.library import Library, Record

pytestmark = pytest.mark.skipif(stub.compiler() is None, reason="the simulated libdcgm needs a C compiler (gcc)")

INTERVAL_MICROS = 50_000
CONNECT_MS = 300
PATIENCE_SECONDS = 20.0
TEMPERATURE, POWER, GPU_UTIL, XID, PROF, DRAM, UUID, PROFILE = 150, 155, 203, 230, 1001, 1005, 54, 50
FIRST_RELEASED_AFTER_4_6_0 = 1603
BLANK_INTEGER, BLANK_DOUBLE = 0x7FFFFFFFFFFFFFF0, 2.0**47
Values = dict[tuple[int, int, int], Record]
"""Records by entity group, entity id and field id."""

# Size, version word and offsets compiled from the headers of DCGM 3.3.9 to 4.6.1, which all have the same.
LAYOUTS: dict[str, tuple[type[ctypes.Structure], int, int, dict[str, int]]] = {
    "dcgmFieldValue_v1": (
        *(abi.FieldValueV1, 4120, 0x01001018),
        {"version": 0, "fieldId": 4, "fieldType": 6, "status": 8, "ts": 16, "value": 24},
    ),
    "dcgmFieldValue_v2": (
        *(abi.FieldValueV2, 4128, 0x02001020),
        {"entityGroupId": 4, "entityId": 8, "fieldId": 12, "fieldType": 14, "status": 16, "ts": 24, "value": 32},
    ),
    "dcgmGroupEntityPair_t": (abi.EntityPair, 8, 0, {"entityGroupId": 0, "entityId": 4}),
    "dcgmConnectV2Params_v2": (
        *(abi.ConnectV2Params, 16, 0x02000010),
        {"persistAfterDisconnect": 4, "timeoutMs": 8, "addressIsUnixSocket": 12},
    ),
    "dcgmConnectV3Params_v1": (abi.ConnectV3Params, 12, 0x0100000C, {"persistAfterDisconnect": 4, "timeoutMs": 8}),
    "dcgmStartEmbeddedV2Params_v1": (
        *(abi.EmbeddedParams, 72, 0x01000048),
        {"opMode": 4, "dcgmHandle": 8, "logFile": 16, "severity": 24, "denyListCount": 28, "denyList": 32},
    ),
    "dcgmMigHierarchyInfo_v2": (
        *(abi.HierarchyInfo, 164, 0),
        {"entity": 0, "parent": 8, "gpuUuid": 16, "nvmlGpuIndex": 144, "nvmlInstanceId": 148}
        | {"nvmlComputeInstanceId": 152, "nvmlMigProfileId": 156, "nvmlProfileSlices": 160},
    ),
    "dcgmMigHierarchy_v2": (abi.Hierarchy, 73480, 0x02011F08, {"count": 4, "entityList": 8}),
    "dcgm_field_meta_t": (
        *(abi.FieldMeta, 72, 0),
        {"fieldType": 2, "size": 3, "tag": 4, "scope": 52, "nvmlFieldId": 56, "entityLevel": 60, "valueFormat": 64},
    ),
    "dcgmProfGetMetricGroups_v3": (
        *(abi.MetricGroups, 1376, 0x03000560),
        {"unused": 4, "gpuId": 8, "numMetricGroups": 12, "metricGroups": 16},
    ),
    "dcgmModuleGetStatuses_v1": (abi.ModuleStatuses, 136, 0x01000088, {"numStatuses": 4, "statuses": 8}),
    "dcgmVersionInfo_v2": (abi.VersionInfo, 516, 0x02000204, {"rawBuildInfoString": 4}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_struct_layout_matches_the_headers(name: str) -> None:
    layout, size, word, offsets = LAYOUTS[name]
    assert ctypes.sizeof(layout) == size
    assert {field: getattr(layout, field).offset for field in offsets} == offsets
    if word:
        assert abi.version_word(layout) == word


def test_every_struct_with_a_version_word_is_checked_against_the_headers() -> None:
    assert set(abi.STRUCT_VERSIONS) == {layout for layout, _, word, _ in LAYOUTS.values() if word}
    assert (ctypes.sizeof(abi.Handle), ctypes.sizeof(abi.Value)) == (8, 4096)


class Client:
    """A connection through the binding; its objects end with it."""

    names = itertools.count()

    def __init__(self, library: Library, control: stub.StubControl) -> None:
        self.library, self.control = library, control
        self.handle = abi.Handle()
        assert library.call("dcgmInit") == abi.Code.OK

    def connect(self, address: str, *, version: int = 2, timeout_ms: int = CONNECT_MS) -> int:
        """Return the code of a connection by one of both functions."""
        parameters: ctypes.Structure
        if version == 3:
            word = abi.version_word(abi.ConnectV3Params)
            parameters = abi.ConnectV3Params(version=word, timeoutMs=timeout_ms)
        else:
            is_unix = address.startswith("unix://")
            address = address.removeprefix("unix://")
            word = abi.version_word(abi.ConnectV2Params)
            parameters = abi.ConnectV2Params(version=word, timeoutMs=timeout_ms, addressIsUnixSocket=is_unix)
        return self.call(f"dcgmConnect_v{version}", address.encode(), byref(parameters), byref(self.handle), bare=True)

    def call(self, name: str, *arguments: object, bare: bool = False) -> int:
        """Return the code of a function of this connection."""
        return self.library.call(name, *(() if bare else (self.handle,)), *arguments)

    def group(self, *entities: tuple[int, int]) -> abi.Handle:
        """Make a group of entities, by default of all GPUs."""
        group = abi.Handle()
        kind = abi.EMPTY_GROUP if entities else 0
        assert self.call("dcgmGroupCreate", kind, b"test", byref(group)) == abi.Code.OK
        for level, number in entities:
            assert self.call("dcgmGroupAddEntity", group, level, number) == abi.Code.OK
        return group

    def field_group(self, *ids: int, name: str = "") -> tuple[int, abi.Handle]:
        """Make a group of fields; return the code and the group."""
        group = abi.Handle()
        numbers = (ctypes.c_ushort * len(ids))(*ids)
        text = (name or f"fields {next(self.names)}").encode()
        return self.call("dcgmFieldGroupCreate", len(ids), numbers, text, byref(group)), group

    def watch(self, group: abi.Handle, fields: abi.Handle, *, keep_samples: int = 1, keep_seconds: float = 0.0) -> int:
        """Watch; return the code."""
        code = self.call("dcgmWatchFields", group, fields, INTERVAL_MICROS, keep_seconds, keep_samples)
        assert self.call("dcgmUpdateAllFields", 1) == abi.Code.OK
        return code

    def watched(self, *ids: int, entities: tuple[tuple[int, int], ...] = ()) -> Callable[[], Values]:
        """Watch fields; return a function that reads them."""
        group = self.group(*entities)
        code, fields = self.field_group(*ids)
        assert code == abi.Code.OK
        assert self.watch(group, fields) == abi.Code.OK
        return lambda: self.latest(group, fields)

    def latest(self, group: abi.Handle, fields: abi.Handle) -> Values:
        """Return the values of a read."""
        found, callback = collector()
        assert self.call("dcgmGetLatestValues_v2", group, fields, callback, None) == abi.Code.OK
        return {(level, number, record.field_id): record for level, number, record in found}


def collector() -> tuple[list[tuple[int, int, Record]], object]:
    """Return a list and the callback that fills it."""
    found: list[tuple[int, int, Record]] = []

    def take(level: int, number: int, address: int, count: int, _user: object) -> int:
        found.extend((level, number, record) for record in libdcgm.records(address, count))
        return 0

    return found, abi.CALLBACK(take)


def later(check: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not check():
        assert time.monotonic() < until, f"not seen within {PATIENCE_SECONDS} s: {what}"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dcgm")
    stub.build(made, major=3, without=["dcgmConnect_v3"])
    return stub.build(made)


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stub.StubControl:
    monkeypatch.setenv("DCGM_STUB_CONTROL", str(tmp_path / "control"))
    return stub.control(tmp_path / "control")


@pytest.fixture
def engine(directory: Path, control: stub.StubControl, tmp_path: Path) -> Iterator[stub.Engine]:
    assert control.size
    with stub.Engine(directory, tmp_path / "control") as running:
        yield running


def load(directory: Path, major: int = 4) -> Library:
    name = f"libdcgm.so.{major}"
    return Library(ctypes.CDLL(str(directory / name)), name)


@pytest.fixture
def library(directory: Path) -> Library:
    return load(directory)


@pytest.fixture
def bare(library: Library, control: stub.StubControl) -> Iterator[Client]:
    client = Client(library, control)
    yield client
    library.call("dcgmShutdown")


@pytest.fixture
def client(bare: Client, engine: stub.Engine) -> Client:
    assert bare.connect(engine.address) == abi.Code.OK
    return bare


# ---- Library and connection ----


@pytest.mark.parametrize(("major", "version"), [(3, 2), (4, 2), (4, 3)])
@pytest.mark.parametrize("by_socket", [False, True], ids=["tcp", "unix"])
def test_engine_of_either_major_version_is_reached_by_tcp_and_socket(
    *, directory: Path, control: stub.StubControl, tmp_path: Path, major: int, version: int, by_socket: bool
) -> None:
    library = load(directory, major)
    path = tmp_path / "engine" if by_socket else None
    with stub.Engine(directory, tmp_path / "control", socket_path=path, release=stub.RELEASES[major]) as engine:
        client = Client(library, control)
        address = engine.address if by_socket or version == 2 else f"tcp://{engine.address}"
        assert client.connect(address, version=version) == abi.Code.OK
        info = abi.VersionInfo(version=abi.version_word(abi.VersionInfo))
        assert client.call("dcgmHostengineVersionInfo", byref(info)) == abi.Code.OK
        assert info.rawBuildInfoString.startswith(f"version:{stub.RELEASES[major]};".encode())
        assert client.call("dcgmDisconnect") == abi.Code.OK
        later(lambda: control.engine.connections == 0, "the engine rid of its client")
        library.call("dcgmShutdown")
    assert ("dcgmConnect_v3" in library.functions) is (major == 4)


def test_library_without_a_required_function_is_refused_by_name(tmp_path: Path) -> None:
    stub.build(tmp_path, without=["dcgmGetLatestValues_v2"])
    with pytest.raises(SourceError, match=r"libdcgm\.so\.4 lacks dcgmGetLatestValues_v2: install DCGM 3\.3"):
        load(tmp_path)


def test_handles_and_groups_keep_their_upper_32_bits(client: Client) -> None:
    assert client.handle.value is not None
    assert client.handle.value >> 32
    group = client.group()
    assert group.value is not None
    assert group.value >> 32
    assert client.call("dcgmGroupDestroy", abi.Handle(group.value & 0xFFFFFFFF)) == abi.Code.NOT_CONFIGURED
    assert client.library.call("dcgmUpdateAllFields", abi.Handle(client.handle.value & 0xFFFFFFFF), 1) < 0
    assert client.call("dcgmGroupDestroy", group) == abi.Code.OK


ASKED = {
    abi.Hierarchy: "dcgmGetGpuInstanceHierarchy",
    abi.MetricGroups: "dcgmProfGetSupportedMetricGroups",
    abi.ModuleStatuses: "dcgmModuleGetStatuses",
    abi.VersionInfo: "dcgmHostengineVersionInfo",
}


@pytest.mark.parametrize("layout", ASKED, ids=lambda layout: layout.__name__)
def test_struct_is_accepted_only_with_its_version_word(client: Client, layout: type[ctypes.Structure]) -> None:
    word = abi.version_word(layout)
    assert client.call(ASKED[layout], byref(layout(version=word))) == abi.Code.OK
    assert client.call(ASKED[layout], byref(layout(version=word - 1))) == abi.Code.VERSION_MISMATCH


def test_engine_of_another_major_version_is_a_mismatch(bare: Client, directory: Path, tmp_path: Path) -> None:
    with stub.Engine(directory, tmp_path / "control", release="3.3.9") as engine:
        assert bare.connect(engine.address) == abi.Code.OK
        reported = abi.VersionInfo(version=abi.version_word(abi.VersionInfo))
        assert bare.call("dcgmHostengineVersionInfo", byref(reported)) == abi.Code.OK
        assert reported.rawBuildInfoString.startswith(b"version:3.3.9;")
        assert bare.call("dcgmUpdateAllFields", 1) == abi.Code.VERSION_MISMATCH
    assert bare.library.describe(abi.Code.VERSION_MISMATCH) == "API version mismatch"


def test_connection_to_a_closed_port_takes_the_whole_timeout(bare: Client) -> None:
    started = time.monotonic()
    assert bare.connect(f"127.0.0.1:{stub.free_port()}", timeout_ms=200) == abi.Code.CONNECTION_LOST
    assert time.monotonic() - started >= 0.19


def test_non_engine_on_the_port_loses_the_connection(bare: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            one, _ = server.accept()
            with one:
                one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
                one.recv(4096)

        thread = threading.Thread(target=serve)
        thread.start()
        # It reports no failed login; the next call does.
        assert bare.connect(f"127.0.0.1:{port}") == abi.Code.OK
        thread.join()
        reported = abi.VersionInfo(version=abi.version_word(abi.VersionInfo))
        assert bare.call("dcgmHostengineVersionInfo", byref(reported)) == abi.Code.CONNECTION_LOST


def test_embedded_engine_starts_and_stops_in_this_process(bare: Client, control: stub.StubControl) -> None:
    parameters = abi.EmbeddedParams(version=abi.version_word(abi.EmbeddedParams), opMode=1)
    assert bare.library.call("dcgmStartEmbedded_v2", byref(parameters)) == abi.Code.OK
    bare.handle = abi.Handle(parameters.dcgmHandle)
    assert control.embedded == 1
    assert bare.watched(TEMPERATURE)()[abi.GPU, 3, TEMPERATURE].value == 53
    assert bare.call("dcgmStopEmbedded") == abi.Code.OK
    assert control.embedded == 0


# ---- Values ----


@pytest.mark.parametrize("per_callback", [1, 7, 0], ids=["one by one", "seven at once", "whole entities"])
def test_delivered_values_are_complete_for_any_callback_size(client: Client, per_callback: int) -> None:
    client.control.per_callback = per_callback
    # Adjacent ids, so that an array of another width is noticed.
    ids = (52, 53, 54, 55, 100, 101, 150, 155, 156, 202, 203, 204, 250, 251, 252, 253)
    found = client.watched(*ids)()
    assert sorted(found) == [(abi.GPU, index, field) for index in range(8) for field in ids]
    for index in range(8):
        values = {field: found[abi.GPU, index, field].value for field in ids}
        assert values == {
            52: index,
            53: b"16500000000%02d" % index,
            54: stub.gpu_uuid(index).encode(),
            55: index,
            100: 1900 + index,
            101: 2600 + index,
            150: 50 + index,
            155: 400.0 + index,
            156: 5_000_000_000_000 + index,
            202: 94_000 + index,
            203: 90 - index,
            204: 40 + index,
            250: 81_559,
            251: 81_559 - 500 - 20_000 - index,
            252: 20_000 + index,
            253: 500,
        }
    kinds = {field: found[abi.GPU, 0, field].type for field in (TEMPERATURE, POWER, UUID)}
    assert kinds == {TEMPERATURE: abi.INTEGER, POWER: abi.DOUBLE, UUID: abi.STRING}
    assert abs(found[abi.GPU, 0, TEMPERATURE].at_microseconds - time.time() * 1e6) < 60e6


def test_entity_list_is_read_without_a_group(client: Client) -> None:
    pairs = (abi.EntityPair * 2)(abi.EntityPair(abi.GPU, 5), abi.EntityPair(abi.GPU, 2))
    ids = (ctypes.c_ushort * 3)(UUID, TEMPERATURE, POWER)
    values = (abi.FieldValueV2 * 6)()
    assert client.call("dcgmEntitiesGetLatestValues", pairs, 2, ids, 3, abi.LIVE, values) == abi.Code.OK
    read = [(one.entityId, one.fieldId, one.status, one.version) for one in values]
    word = abi.version_word(abi.FieldValueV2)
    assert read == [(index, field, abi.Code.OK, word) for index in (5, 2) for field in (UUID, TEMPERATURE, POWER)]
    assert (values[0].value.str, values[4].value.i64, values[5].value.dbl) == (stub.gpu_uuid(5).encode(), 52, 402.0)


def test_negative_callback_result_ends_the_delivery(client: Client) -> None:
    group = client.group()
    _, fields = client.field_group(TEMPERATURE)
    client.watch(group, fields)
    seen: list[int] = []

    def once(_level: int, number: int, _address: int, _count: int, _user: object) -> int:
        seen.append(number)
        return -1

    client.call("dcgmGetLatestValues_v2", group, fields, abi.CALLBACK(once), None)
    assert seen == [0]


BLANKS = {
    "no value": (stub.BLANK, 0),
    "not found": (stub.BLANK, 1),
    "not supported": (stub.BLANK, 2),
    "not permitted": (stub.BLANK, 3),
}


@pytest.mark.parametrize("name", BLANKS)
def test_blank_has_status_0_and_the_spelling_of_its_type(client: Client, name: str) -> None:
    what, code = BLANKS[name]
    for field in (TEMPERATURE, POWER, UUID):
        client.control.override(field, what, code=code)
    found = client.watched(TEMPERATURE, POWER, UUID, GPU_UTIL)()
    texts = [b"<<<NULL>>>", b"<<<NOT_FOUND>>>", b"<<<NOT_SUPPORTED>>>", b"<<<NOT_PERM>>>"]
    blanks = {TEMPERATURE: BLANK_INTEGER + code, POWER: BLANK_DOUBLE + code, UUID: texts[code]}
    for index in range(8):
        for field, blank in blanks.items():
            assert (found[abi.GPU, index, field].status, found[abi.GPU, index, field].value) == (abi.Code.OK, blank)
        assert found[abi.GPU, index, GPU_UTIL].value == 90 - index


def test_profiling_field_is_blank_for_the_first_interval(client: Client) -> None:
    read = client.watched(PROF)
    first = read()[abi.GPU, 0, PROF]
    assert (first.status, first.value) == (abi.Code.OK, BLANK_DOUBLE)
    later(lambda: read()[abi.GPU, 0, PROF].value == pytest.approx(0.805), "the ratio")


def test_unwatched_field_and_field_without_data_have_error_codes(client: Client) -> None:
    _, unwatched = client.field_group(POWER)
    group = client.group((abi.GPU, 0))
    client.watched(XID, TEMPERATURE, entities=((abi.GPU, 0),))
    _, both = client.field_group(XID, POWER)
    found = client.latest(group, both)
    assert {field: record.status for (_, _, field), record in found.items()} == {
        XID: abi.Code.NO_DATA,
        POWER: abi.Code.NOT_WATCHED,
    }
    assert client.latest(group, unwatched)[abi.GPU, 0, POWER].value == BLANK_DOUBLE


def test_values_since_returns_each_xid_once(client: Client, control: stub.StubControl) -> None:
    group = client.group()
    _, fields = client.field_group(XID)
    stub.xid(control, 2, 13)
    assert client.watch(group, fields, keep_samples=100, keep_seconds=3600.0) == abi.Code.OK
    stub.xid(control, 2, 79)
    stub.xid(control, 2, 79)
    stub.xid(control, 5, 31)

    def since(start: int) -> tuple[list[tuple[int, int | float | bytes]], int]:
        following = ctypes.c_int64()
        found, callback = collector()
        code = client.call("dcgmGetValuesSince_v2", group, fields, start, byref(following), callback, None)
        assert code == abi.Code.OK
        return [(number, record.value) for _, number, record in found], following.value

    first, following = since(0)
    assert first == [(2, 79), (2, 79), (5, 31)]
    reported, later = since(following)
    assert reported == []
    assert later > following
    stub.xid(control, 0, 48)
    assert since(later)[0] == [(0, 48)]


# ---- Refusals ----


def test_field_unknown_to_the_engine_fails_its_whole_group(client: Client, library: Library) -> None:
    assert library.field_meta(FIRST_RELEASED_AFTER_4_6_0) is None
    assert client.field_group(TEMPERATURE, FIRST_RELEASED_AFTER_4_6_0)[0] == abi.Code.BAD_PARAMETER
    assert abi.MAX_FIELDS_PER_GROUP == 127
    assert client.field_group(*([TEMPERATURE] * 128))[0] == abi.Code.BAD_PARAMETER
    assert client.field_group(*([TEMPERATURE] * abi.MAX_FIELDS_PER_GROUP))[0] == abi.Code.OK


def test_newer_library_has_fields_that_its_engine_refuses(
    control: stub.StubControl, engine: stub.Engine, tmp_path: Path
) -> None:
    library = load(stub.build(tmp_path / "newer", release="4.7.0"))
    meta = library.field_meta(FIRST_RELEASED_AFTER_4_6_0)
    assert meta is not None
    assert (meta.fieldId, meta.fieldType, meta.entityLevel) == (FIRST_RELEASED_AFTER_4_6_0, b"i", abi.GPU)
    client = Client(library, control)
    assert client.connect(engine.address, version=3) == abi.Code.OK
    assert client.field_group(FIRST_RELEASED_AFTER_4_6_0)[0] == abi.Code.BAD_PARAMETER
    library.call("dcgmShutdown")


def test_field_types_and_levels_are_returned_by_id(library: Library) -> None:
    reported = {}
    for field in (1, UUID, TEMPERATURE, POWER, PROF, DRAM, 1009):
        meta = library.field_meta(field)
        assert meta is not None
        reported[field] = (meta.fieldType, meta.entityLevel)
    assert reported == {
        1: (b"s", abi.NONE),
        UUID: (b"s", abi.COMPUTE_INSTANCE),
        TEMPERATURE: (b"i", abi.GPU),
        POWER: (b"d", abi.GPU),
        PROF: (b"d", abi.COMPUTE_INSTANCE),
        DRAM: (b"d", abi.GPU_INSTANCE),
        1009: (b"i", abi.GPU),
    }


def test_missing_profiling_module_fails_the_watch_and_freezes_its_other_fields(
    client: Client, control: stub.StubControl
) -> None:
    control.module_present = 0
    group = client.group((abi.GPU, 0))
    _, fields = client.field_group(TEMPERATURE, PROF)
    assert client.watch(group, fields) == abi.Code.MODULE_NOT_LOADED
    first = client.latest(group, fields)
    assert first[abi.GPU, 0, PROF].status == abi.Code.NOT_WATCHED
    assert first[abi.GPU, 0, TEMPERATURE].value == 50
    time.sleep(3 * INTERVAL_MICROS / 1e6)
    again = client.latest(group, fields)
    assert again[abi.GPU, 0, TEMPERATURE].at_microseconds == first[abi.GPU, 0, TEMPERATURE].at_microseconds
    groups = abi.MetricGroups(version=abi.version_word(abi.MetricGroups))
    assert client.call("dcgmProfGetSupportedMetricGroups", byref(groups)) == abi.Code.MODULE_NOT_LOADED


def test_groups_belong_to_their_connection_and_end_with_it(
    client: Client, control: stub.StubControl, engine: stub.Engine
) -> None:
    group = client.group()
    _, fields = client.field_group(TEMPERATURE, name="mine")
    assert client.watch(group, fields) == abi.Code.OK
    other = Client(client.library, control)
    assert other.connect(engine.address) == abi.Code.OK
    assert other.watch(group, fields) == abi.Code.NOT_CONFIGURED
    assert other.field_group(POWER, name="mine")[0] == abi.Code.DUPLICATE_KEY
    left = (control.engine.connections, control.engine.groups, control.engine.field_groups, control.engine.watches)
    assert left == (2, 1, 1, 1)
    assert client.call("dcgmDisconnect") == abi.Code.OK
    later(lambda: (control.engine.connections, control.engine.groups) == (1, 0), "the first client's things gone")
    assert (control.engine.field_groups, control.engine.watches) == (0, 0)
    other.library.call("dcgmShutdown")


def test_engine_limits_the_number_of_groups(client: Client) -> None:
    codes = [client.call("dcgmGroupCreate", abi.EMPTY_GROUP, b"same name", byref(abi.Handle())) for _ in range(62)]
    assert codes == [abi.Code.OK] * 61 + [abi.Code.LIMIT_REACHED]


def test_live_read_of_a_profiling_field_kills_the_engine(client: Client, engine: stub.Engine) -> None:
    pairs, ids = (abi.EntityPair * 1)(abi.EntityPair(abi.GPU, 0)), (ctypes.c_ushort * 1)(PROF)
    values = (abi.FieldValueV2 * 1)()
    assert client.call("dcgmEntitiesGetLatestValues", pairs, 1, ids, 1, abi.LIVE, values) == abi.Code.CONNECTION_LOST
    assert engine.has_crashed()


# ---- MIG ----


@pytest.fixture
def partitioned(client: Client) -> Client:
    for index in range(8):
        gpu = client.control.gpus[index]
        gpu.instance_count = stub.MAX_INSTANCES
        for place in range(stub.MAX_INSTANCES):
            gpu.instances[place] = stub.StubInstance(100 * place + index, 0, (1_000 + 10 * index + place) * stub.MIB)
    return client


def test_hierarchy_of_56_instances_has_each_instance_and_its_parent(partitioned: Client) -> None:
    reported = abi.Hierarchy(version=abi.version_word(abi.Hierarchy))
    assert partitioned.call("dcgmGetGpuInstanceHierarchy", byref(reported)) == abi.Code.OK
    assert reported.count == 2 * 56
    for row, (index, place, level) in zip(
        reported.entityList,
        itertools.product(range(8), range(7), (abi.GPU_INSTANCE, abi.COMPUTE_INSTANCE)),
        strict=False,
    ):
        number = stub.entity_id(index, place)
        assert (row.entity.entityGroupId, row.entity.entityId) == (level, number)
        parent = (abi.GPU, index) if level == abi.GPU_INSTANCE else (abi.GPU_INSTANCE, number)
        assert (row.parent.entityGroupId, row.parent.entityId) == parent
        assert row.gpuUuid.decode() == stub.gpu_uuid(index)
        compute = 0xFFFFFFFF if level == abi.GPU_INSTANCE else 0
        assert (row.nvmlGpuIndex, row.nvmlInstanceId, row.nvmlComputeInstanceId) == (index, 7 + place, compute)
        assert row.nvmlProfileSlices == 1


def test_instance_has_its_own_values_parent_values_and_blanks(partitioned: Client) -> None:
    number = stub.entity_id(6, 5)
    levels = ((abi.GPU_INSTANCE, number), (abi.COMPUTE_INSTANCE, number), (abi.GPU, 6))
    read = partitioned.watched(*(UUID, PROFILE, TEMPERATURE, GPU_UTIL, 252, PROF, DRAM, 1009), entities=levels)
    later(lambda: read()[abi.GPU, 6, PROF].value != BLANK_DOUBLE, "the ratios")
    found = read()
    for level in (abi.GPU_INSTANCE, abi.COMPUTE_INSTANCE):
        mine = {field: record.value for (at, _, field), record in found.items() if at == level}
        assert (mine[UUID], mine[PROFILE]) == (stub.instance_uuid(6, 5).encode(), b"1g.10gb")
        assert mine[252] == 1_065
        assert mine[PROF] == pytest.approx(0.506)
        assert mine[TEMPERATURE] == 56, "the temperature of the parent"
        assert mine[1009] == BLANK_INTEGER
    assert found[abi.GPU_INSTANCE, number, DRAM].value == pytest.approx(0.506 * 0.3)
    assert found[abi.COMPUTE_INSTANCE, number, DRAM].value == BLANK_DOUBLE
    assert found[abi.GPU, 6, GPU_UTIL].value == BLANK_INTEGER + 2


def test_too_small_entity_list_returns_the_required_size(partitioned: Client) -> None:
    ids, count = (ctypes.c_uint * 1)(), ctypes.c_int(1)
    reported = partitioned.call("dcgmGetEntityGroupEntities", abi.GPU_INSTANCE, ids, byref(count), 0)
    assert (reported, count.value) == (abi.Code.BUFFER_TOO_SMALL, 56)


# ---- Engines that die, hang and are slow ----


def test_killed_engine_fails_the_call_within_1_second_and_restarts_empty(
    client: Client, engine: stub.Engine, control: stub.StubControl
) -> None:
    read = client.watched(TEMPERATURE)
    read()
    engine.kill()
    started = time.monotonic()
    assert client.call("dcgmUpdateAllFields", 1) == abi.Code.CONNECTION_LOST
    assert time.monotonic() - started < 1.0
    assert client.call("dcgmDisconnect") == abi.Code.OK
    engine.start()
    assert client.connect(engine.address) == abi.Code.OK
    assert (control.engine.groups, control.engine.watches) == (0, 0)
    assert client.watched(TEMPERATURE)()[abi.GPU, 7, TEMPERATURE].value == 57


def test_stopped_engine_blocks_the_call_until_it_resumes(client: Client, engine: stub.Engine) -> None:
    codes: list[int] = []
    engine.stop()
    thread = threading.Thread(target=lambda: codes.append(client.call("dcgmUpdateAllFields", 1)))
    thread.start()
    thread.join(timeout=0.5)
    assert thread.is_alive(), "the call returned from a stopped engine"
    engine.resume()
    thread.join(timeout=PATIENCE_SECONDS)
    assert codes == [abi.Code.OK]


def test_unresponsive_engine_fails_after_the_connect_timeout(bare: Client, engine: stub.Engine) -> None:
    engine.stop()
    started = time.monotonic()
    assert bare.connect(engine.address, timeout_ms=200) == abi.Code.CONNECTION_LOST
    assert 0.19 <= time.monotonic() - started < 2.0


def test_slow_engine_delays_a_call_and_loses_nothing(client: Client, control: stub.StubControl) -> None:
    read = client.watched(TEMPERATURE, POWER)
    control.slow_micros = 200_000
    started = time.monotonic()
    found = read()
    assert time.monotonic() - started >= 0.19
    assert len(found) == 16
