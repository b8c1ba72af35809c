"""Binds libdcgm 3.3 to 4.7 by ctypes: structures, version words, codes and signatures."""

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_ubyte,
    c_uint,
    c_ushort,
    c_void_p,
)
from typing import Any, NamedTuple, TypeVar

from exporter.errors import SourceError


class Code:
    """Return codes (dcgmReturn_t) in use; not an enum, because access to its members takes ten times longer."""

    OK = 0
    BAD_PARAMETER = -1
    ERROR = -3
    NOT_CONFIGURED = -5
    NOT_SUPPORTED = -6
    NVML_ERROR = -8
    TIMEOUT = -11
    VERSION_MISMATCH = -12
    UNKNOWN_FIELD = -13
    NO_DATA = -14
    STALE = -15
    NOT_WATCHED = -16
    NO_PERMISSION = -17
    GPU_IS_LOST = -18
    RESET_REQUIRED = -19
    CONNECTION_LOST = -21
    GPU_NOT_SUPPORTED = -22
    LIMIT_REACHED = -24
    DUPLICATE_KEY = -26
    REQUIRES_ROOT = -29
    BUFFER_TOO_SMALL = -31
    MODULE_NOT_LOADED = -33
    IN_USE = -34
    PROFILING_NOT_SUPPORTED = -36
    PROFILING_LIBRARY_ERROR = -37
    PROFILING_MULTI_PASS = -38
    DRIVER_TOO_OLD = -44
    PAUSED = -54
    NVML_NOT_LOADED = -56
    NVML_DRIVER_TIMEOUT = -57
    DETACHED = -67


_REASONS: Mapping[int, str] = {code: name.lower() for name, code in vars(Code).items() if name.isupper()}


def reason_of(code: int) -> str:
    """Return a snake-case reason for a dcgmReturn_t, valid as a label value."""
    return "dcgm_" + _REASONS.get(code, f"error_{abs(code)}")


# Entity groups (dcgm_field_entity_group_t); the levels of fields are the same numbers.
NONE, GPU, GPU_INSTANCE, COMPUTE_INSTANCE = 0, 1, 4, 5

# Kinds of groups (dcgmGroupType_t).
EMPTY_GROUP = 1

# Field types: character codes of the library.
BINARY, DOUBLE, INTEGER, STRING, TIMESTAMP = (ord(letter) for letter in "bdist")

# Modules and their states (dcgmModuleId_t, dcgmModuleStatus_t).
PROFILING_MODULE = 8
MODULE_LOADED, MODULE_PAUSED = 3, 5

LIVE = 0x1
"""Flag of dcgmEntitiesGetLatestValues: read from the driver now. With a profiling field, it terminates the engine."""
SUPPORTED_ONLY = 0x1
DISABLED = 6
"""Status of every working GPU (DcgmEntityStatus_t) while telemetry is paused."""

MAX_GPUS = 32
MAX_FIELDS_PER_GROUP = 127
"""One less than DCGM_MAX_FIELD_IDS_PER_FIELD_GROUP, at which the engine refuses the group."""
MAX_ENTITIES_PER_GROUP = 64
"""Limit of DCGM 3; DCGM 4 allows 1024."""
MAX_HIERARCHY = 448
STRING_BYTES = 256
BLOB_BYTES = 4096

Layout = TypeVar("Layout", bound=Structure)
Handle = c_size_t
"""Handle of a connection, a group of entities or a group of fields: as wide as a pointer, unlike ctypes' int."""


class Value(ctypes.Union):
    """Content of a field value; the ``type`` next to it selects the member."""

    _fields_ = (("i64", c_int64), ("dbl", c_double), ("str", c_char * STRING_BYTES), ("blob", c_char * BLOB_BYTES))


class Record(NamedTuple):
    """One field value as the library delivers it."""

    field_id: int
    type: int
    status: int
    at_microseconds: int
    value: int | float | bytes
    """Bytes up to the first zero for strings; the raw number for every other type."""


class FieldValueV1(Structure):
    """dcgmFieldValue_v1: passed to callbacks."""

    _fields_ = (
        ("version", c_uint),
        ("fieldId", c_ushort),
        ("fieldType", c_ushort),
        ("status", c_int),
        ("ts", c_int64),
        ("value", Value),
    )


class FieldValueV2(Structure):
    """dcgmFieldValue_v2: includes its entity."""

    _fields_ = (
        ("version", c_uint),
        ("entityGroupId", c_uint),
        ("entityId", c_uint),
        ("fieldId", c_ushort),
        ("fieldType", c_ushort),
        ("status", c_int),
        ("unused", c_uint),
        ("ts", c_int64),
        ("value", Value),
    )

    def record(self) -> Record:
        """Return the value without its entity."""
        member = {STRING: "str", DOUBLE: "dbl"}.get(self.fieldType, "i64")
        return Record(self.fieldId, self.fieldType, self.status, self.ts, getattr(self.value, member))


class EntityPair(Structure):
    """dcgmGroupEntityPair_t."""

    _fields_ = (("entityGroupId", c_uint), ("entityId", c_uint))


class ConnectV2Params(Structure):
    """dcgmConnectV2Params_v2."""

    _fields_ = (
        ("version", c_uint),
        ("persistAfterDisconnect", c_uint),
        ("timeoutMs", c_uint),
        ("addressIsUnixSocket", c_uint),
    )


class ConnectV3Params(Structure):
    """dcgmConnectV3Params_v1, in DCGM 4.5 and later."""

    _fields_ = (("version", c_uint), ("persistAfterDisconnect", c_uint), ("timeoutMs", c_uint))


class EmbeddedParams(Structure):
    """dcgmStartEmbeddedV2Params_v1."""

    _fields_ = (
        ("version", c_uint),
        ("opMode", c_uint),
        ("dcgmHandle", Handle),
        ("logFile", c_char_p),
        ("severity", c_uint),
        ("denyListCount", c_uint),
        ("denyList", c_uint * 10),
    )


class HierarchyInfo(Structure):
    """dcgmMigHierarchyInfo_v2: one GPU instance or compute instance, and its parent."""

    _fields_ = (
        ("entity", EntityPair),
        ("parent", EntityPair),
        ("gpuUuid", c_char * 128),
        ("nvmlGpuIndex", c_uint),
        ("nvmlInstanceId", c_uint),
        ("nvmlComputeInstanceId", c_uint),
        ("nvmlMigProfileId", c_uint),
        ("nvmlProfileSlices", c_uint),
    )


class Hierarchy(Structure):
    """dcgmMigHierarchy_v2."""

    _fields_ = (("version", c_uint), ("count", c_uint), ("entityList", HierarchyInfo * MAX_HIERARCHY))


class FieldMeta(Structure):
    """dcgm_field_meta_t: the library's description of a field."""

    _fields_ = (
        ("fieldId", c_ushort),
        ("fieldType", c_char),
        ("size", c_ubyte),
        ("tag", c_char * 48),
        ("scope", c_int),
        ("nvmlFieldId", c_int),
        ("entityLevel", c_uint),
        ("valueFormat", c_void_p),
    )


class MetricGroup(Structure):
    """dcgmProfMetricGroupInfo_v2: profiling fields that are measured together."""

    _fields_ = (
        ("majorId", c_ushort),
        ("minorId", c_ushort),
        ("numFieldIds", c_uint),
        ("fieldIds", c_ushort * 64),
    )


class MetricGroups(Structure):
    """dcgmProfGetMetricGroups_v3."""

    _fields_ = (
        ("version", c_uint),
        ("unused", c_uint),
        ("gpuId", c_uint),
        ("numMetricGroups", c_uint),
        ("metricGroups", MetricGroup * 10),
    )


class ModuleStatus(Structure):
    """dcgmModuleGetStatusesModule_t."""

    _fields_ = (("id", c_uint), ("status", c_uint))


class ModuleStatuses(Structure):
    """dcgmModuleGetStatuses_v1."""

    _fields_ = (("version", c_uint), ("numStatuses", c_uint), ("statuses", ModuleStatus * 16))


class VersionInfo(Structure):
    """dcgmVersionInfo_v2: ``version:4.6.0;arch:x86_64;...``."""

    _fields_ = (("version", c_uint), ("rawBuildInfoString", c_char * 512))


STRUCT_VERSIONS: Mapping[type[Structure], int] = {
    FieldValueV1: 1,
    FieldValueV2: 2,
    ConnectV2Params: 2,
    ConnectV3Params: 1,
    EmbeddedParams: 1,
    Hierarchy: 2,
    MetricGroups: 3,
    ModuleStatuses: 1,
    VersionInfo: 2,
}


def version_word(layout: type[Structure]) -> int:
    """Return a struct's ``version``: its size, and the number of its version in the top byte."""
    return ctypes.sizeof(layout) | STRUCT_VERSIONS[layout] << 24


def versioned(layout: type[Layout], **values: object) -> Layout:
    """Return a struct with its version word and the given values."""
    return layout(version=version_word(layout), **values)


CALLBACK = CFUNCTYPE(c_int, c_uint, c_uint, c_void_p, c_int, c_void_p)
"""dcgmFieldValueEntityEnumeration_f: entity group, entity id, address of ``FieldValueV1`` records, their number, user
data; a negative result ends the enumeration. The records belong to the library and are invalid after the call."""

_HANDLE_OUT = POINTER(Handle)
SIGNATURES: Mapping[str, tuple[object, ...]] = {
    "dcgmInit": (),
    "dcgmShutdown": (),
    "dcgmConnect_v2": (c_char_p, POINTER(ConnectV2Params), _HANDLE_OUT),
    "dcgmConnect_v3": (c_char_p, POINTER(ConnectV3Params), _HANDLE_OUT),
    "dcgmDisconnect": (Handle,),
    "dcgmStartEmbedded_v2": (POINTER(EmbeddedParams),),
    "dcgmStopEmbedded": (Handle,),
    "dcgmHostengineVersionInfo": (Handle, POINTER(VersionInfo)),
    "dcgmVersionInfo": (POINTER(VersionInfo),),
    "dcgmGetGpuStatus": (Handle, c_uint, POINTER(c_int)),
    "dcgmGetEntityGroupEntities": (Handle, c_uint, POINTER(c_uint), POINTER(c_int), c_uint),
    "dcgmGetGpuInstanceHierarchy": (Handle, POINTER(Hierarchy)),
    "dcgmGroupCreate": (Handle, c_int, c_char_p, _HANDLE_OUT),
    "dcgmGroupAddEntity": (Handle, Handle, c_uint, c_uint),
    "dcgmGroupDestroy": (Handle, Handle),
    "dcgmFieldGroupCreate": (Handle, c_int, POINTER(c_ushort), c_char_p, _HANDLE_OUT),
    "dcgmFieldGroupDestroy": (Handle, Handle),
    "dcgmWatchFields": (Handle, Handle, Handle, c_int64, c_double, c_int),
    "dcgmUnwatchFields": (Handle, Handle, Handle),
    "dcgmUpdateAllFields": (Handle, c_int),
    "dcgmEntitiesGetLatestValues": (
        *(Handle, POINTER(EntityPair), c_uint, POINTER(c_ushort), c_uint, c_uint, POINTER(FieldValueV2)),
    ),
    "dcgmGetLatestValues_v2": (Handle, Handle, Handle, CALLBACK, c_void_p),
    "dcgmGetValuesSince_v2": (Handle, Handle, Handle, c_int64, POINTER(c_int64), CALLBACK, c_void_p),
    "dcgmProfGetSupportedMetricGroups": (Handle, POINTER(MetricGroups)),
    "dcgmModuleGetStatuses": (Handle, POINTER(ModuleStatuses)),
}
"""Functions that return a dcgmReturn_t, and their arguments."""
_OPTIONAL = frozenset({"dcgmConnect_v3"})
"""Functions that some supported versions of DCGM lack."""
OTHER_SIGNATURES: Mapping[str, tuple[object, tuple[object, ...]]] = {
    "errorString": (c_char_p, (c_int,)),
    "DcgmFieldGetById": (POINTER(FieldMeta), (c_ushort,)),
}


SONAMES = ("libdcgm.so.4", "libdcgm.so.3")
"""Names of the library, newest first; client and engine must have the same major version."""


class Library:
    """A loaded libdcgm.

    Args:
        functions: Object with the C functions as attributes: a ``ctypes.CDLL``, or the simulator's replacement.
        soname: Name of the library; the digit at its end is its major version.
        knock: Replaces ``engine.knock``; ``None``: a socket is used.

    Raises:
        SourceError: A function that every supported DCGM has is missing; reason ``dcgm_library_incomplete``.
    """

    def __init__(
        self,
        functions: Any,  # noqa: ANN401 - a CDLL has any attribute
        soname: str,
        knock: Callable[[str, float], str] | None = None,
    ) -> None:
        self.soname = soname
        self.knock = knock
        self.functions: dict[str, Callable[..., Any]] = {}
        """Functions of this version by name."""
        codes = {name: (c_int, arguments) for name, arguments in SIGNATURES.items()}
        for name, (result, arguments) in {**codes, **OTHER_SIGNATURES}.items():
            function = getattr(functions, name, None)
            if function is not None:
                function.restype, function.argtypes = result, list(arguments)
                self.functions[name] = function
        missing = sorted((SIGNATURES.keys() | OTHER_SIGNATURES.keys()) - self.functions.keys() - _OPTIONAL)
        if missing:
            raise SourceError(
                "dcgm_library_incomplete",
                f"{soname} lacks {', '.join(missing)}: install DCGM 3.3 or later (package datacenter-gpu-manager)",
            )

    @property
    def major(self) -> int:
        """Major version from its name: 3 or 4."""
        return int(self.soname.rpartition(".")[2])

    def call(self, name: str, *arguments: object) -> int:
        """Call a function and return its dcgmReturn_t; ``ctypes`` converts by the signature."""
        return int(self.functions[name](*arguments))

    def describe(self, code: int) -> str:
        """Return the library's text for a return code."""
        text: bytes | None = self.functions["errorString"](code)
        return text.decode("utf-8", "replace") if text else f"error {code}"

    def field_meta(self, field_id: int) -> FieldMeta | None:
        """Return the library's description of a field; ``None`` for a field that this version does not have."""
        found = self.functions["DcgmFieldGetById"](field_id)
        return found.contents if found else None


class _Loaded:
    """Holds the library of this process, which stays loaded."""

    library: Library | None = None
    preferred = SONAMES[0]


def install(functions: object, soname: str = SONAMES[0], *, knock: Callable[[str, float], str] | None = None) -> None:
    """Replace the library, as if the process had just loaded the replacement; used by the simulator."""
    _Loaded.library = Library(functions, soname, knock)


def uninstall() -> None:
    """Forget the library; the next ``load`` searches for one."""
    _Loaded.library = None


def prefer(soname: str) -> None:
    """Set the library that ``load`` tries first."""
    _Loaded.preferred = soname


def load() -> Library:
    """Load libdcgm if it is not loaded yet.

    Raises:
        SourceError: The library is not found (reason ``dcgm_library_not_found``), or is too old.
    """
    if _Loaded.library is None:
        _Loaded.library = _open()
    return _Loaded.library


def _open() -> Library:
    errors = []
    for soname in sorted(SONAMES, key=lambda one: one != _Loaded.preferred):
        try:
            # The modules that the library loads use its symbols from the process.
            return Library(ctypes.CDLL(soname, mode=ctypes.RTLD_GLOBAL), soname)
        except OSError as error:
            errors.append(str(error))
    raise SourceError(
        "dcgm_library_not_found",
        f"libdcgm was not found ({'; '.join(errors)}): install DCGM's client library (package datacenter-gpu-manager,"
        " or datacenter-gpu-manager-4-core), of the host engine's major version",
    )


_HEAD = struct.Struct("<IHHi4xq")
_INTEGER = struct.Struct("<q")
_DOUBLE = struct.Struct("<d")
_RECORD_BYTES = ctypes.sizeof(FieldValueV1)
_VALUE_OFFSET = FieldValueV1.value.offset


def records(address: int, count: int) -> Iterator[Record]:
    """Read the records of a callback in place: their 4 KiB each are not copied.

    Args:
        address: Address of the first ``FieldValueV1``.
        count: Number of records.
    """
    memory = memoryview((ctypes.c_char * (_RECORD_BYTES * count)).from_address(address)).cast("B")
    for start in range(0, _RECORD_BYTES * count, _RECORD_BYTES):
        _, field_id, kind, status, at = _HEAD.unpack_from(memory, start)
        place = start + _VALUE_OFFSET
        value: int | float | bytes
        if kind == DOUBLE:
            (value,) = _DOUBLE.unpack_from(memory, place)
        elif kind == STRING:
            value = bytes(memory[place : place + STRING_BYTES]).partition(b"\0")[0]
        else:
            (value,) = _INTEGER.unpack_from(memory, place)
        yield Record(field_id, kind, status, at, value)
