"""The ABI of libdcgm from DCGM 3.3 to 4.7, and nothing of its meaning: layouts, version words, codes, signatures."""

import ctypes
from collections.abc import Mapping
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

# Return codes (dcgmReturn_t) that something here depends on.
OK = 0
BAD_PARAMETER = -1
GENERIC = -3
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
CONNECTION_GONE = -21
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

# Entity groups (dcgm_field_entity_group_t); the levels of fields are the same numbers.
NONE, GPU, GPU_INSTANCE, COMPUTE_INSTANCE = 0, 1, 4, 5

# Kinds of groups (dcgmGroupType_t).
EMPTY_GROUP = 1

# Field types, as the character codes that the library tells them by.
BINARY, DOUBLE, INTEGER, STRING, TIMESTAMP = (ord(letter) for letter in "bdist")

# Modules and their states (dcgmModuleId_t, dcgmModuleStatus_t).
PROFILING_MODULE = 8
MODULE_FAILED, MODULE_LOADED, MODULE_PAUSED = 2, 3, 5

LIVE = 0x1
"""Flag of dcgmEntitiesGetLatestValues: ask the driver now. Never with a profiling field: it kills the engine."""
SUPPORTED_ONLY = 0x1

MAX_GPUS = 32
MAX_FIELDS_PER_GROUP = 127
"""One less than DCGM_MAX_FIELD_IDS_PER_FIELD_GROUP, with which the engine refuses the group."""
MAX_ENTITIES_PER_GROUP = 64
"""Of DCGM 3; 4 takes 1024."""
MAX_HIERARCHY = 448
STRING_BYTES = 256
BLOB_BYTES = 4096

Handle = c_size_t
"""Of a connection, a group of entities or a group of fields: as wide as a pointer, whatever ctypes takes an int for."""


class Value(ctypes.Union):
    """What a field value holds; ``type`` beside it says which."""

    _fields_ = (("i64", c_int64), ("dbl", c_double), ("str", c_char * STRING_BYTES), ("blob", c_char * BLOB_BYTES))


class FieldValueV1(Structure):
    """dcgmFieldValue_v1: what a callback gets."""

    _fields_ = (
        ("version", c_uint),
        ("fieldId", c_ushort),
        ("fieldType", c_ushort),
        ("status", c_int),
        ("ts", c_int64),
        ("value", Value),
    )


class FieldValueV2(Structure):
    """dcgmFieldValue_v2: with the entity that it is of."""

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
    """dcgmConnectV3Params_v1, of DCGM 4.5 and later."""

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
    """dcgmMigHierarchyInfo_v2: one GPU instance or compute instance, and what it is a part of."""

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
    """dcgm_field_meta_t: what the library knows of a field."""

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


class Health(Structure):
    """dcgmHostengineHealth_v1; 0 is good."""

    _fields_ = (("version", c_uint), ("overallHealth", c_uint))


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
    Health: 1,
}


def version_word(layout: type[Structure]) -> int:
    """Return what stands in a struct's ``version``: its size, and the number of its version in the top byte."""
    return ctypes.sizeof(layout) | STRUCT_VERSIONS[layout] << 24


CALLBACK = CFUNCTYPE(c_int, c_uint, c_uint, c_void_p, c_int, c_void_p)
"""dcgmFieldValueEntityEnumeration_f: entity group, entity id, address of ``FieldValueV1`` records, their number, user
data; a negative answer ends the enumeration. The records are the library's and are gone after the call."""

_HANDLE_OUT = POINTER(Handle)
SIGNATURES: Mapping[str, tuple[object, ...]] = {
    "dcgmInit": (),
    "dcgmShutdown": (),
    "dcgmConnect_v2": (c_char_p, POINTER(ConnectV2Params), _HANDLE_OUT),
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
"""Functions that every supported DCGM has, and their arguments; all return a dcgmReturn_t."""

OPTIONAL_SIGNATURES: Mapping[str, tuple[object, ...]] = {
    "dcgmConnect_v3": (c_char_p, POINTER(ConnectV3Params), _HANDLE_OUT),
    "dcgmHostengineIsHealthy": (Handle, POINTER(Health)),
}
OTHER_SIGNATURES: Mapping[str, tuple[object, tuple[object, ...]]] = {
    "errorString": (c_char_p, (c_int,)),
    "DcgmFieldGetById": (POINTER(FieldMeta), (c_ushort,)),
}
