"""Protobuf messages of the kubelet's pod-resources API v1, built at run time.

Generated code would tie us to one protobuf runtime. Fields that are not listed are skipped when read, so only what is
read is listed. The notation is one string per message, ``"name number type, ..."``; a type starts with ``*`` when it is
repeated and with ``?`` when its presence counts.
"""

from collections.abc import Mapping

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from google.protobuf.message import DecodeError, Message

__all__ = ["ALLOCATABLE_METHOD", "LIST_METHOD", "READ_SCHEMA", "SERVICE", "DecodeError", "Message", "build_messages"]

SERVICE = "v1.PodResourcesLister"
LIST_METHOD = f"/{SERVICE}/List"
ALLOCATABLE_METHOD = f"/{SERVICE}/GetAllocatableResources"

READ_SCHEMA: Mapping[str, str] = {
    "ContainerDevices": "resource_name 1 string, device_ids 2 *string",
    "CDIDevice": "name 1 string",
    "ClaimResource": (
        "cdi_devices 1 *CDIDevice, driver_name 2 string, pool_name 3 string, device_name 4 string, share_id 5 ?string"
    ),
    "DynamicResource": "claim_name 2 string, claim_namespace 3 string, claim_resources 4 *ClaimResource",
    "ContainerResources": "name 1 string, devices 2 *ContainerDevices, dynamic_resources 5 *DynamicResource",
    "PodResources": "name 1 string, namespace 2 string, containers 3 *ContainerResources",
    "ListPodResourcesResponse": "pod_resources 1 *PodResources",
    "AllocatableResourcesResponse": "devices 1 *ContainerDevices",
}

_SCALARS = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
}


def build_messages(schema: Mapping[str, str] = READ_SCHEMA) -> Mapping[str, type[Message]]:
    """Make one message class per entry of a schema, in a descriptor pool of its own.

    Args:
        schema: Message name to its fields, in the notation of this module.

    Returns:
        Message name to class.
    """
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for spec in filter(None, fields.split(", ")):
            _add_field(message, spec, schema)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v1.{name}")) for name in schema}


def _add_field(message: descriptor_pb2.DescriptorProto, spec: str, schema: Mapping[str, str]) -> None:
    name, number, kind = spec.split()
    bare = kind.lstrip("*?")
    repeated = kind.startswith("*")
    field = message.field.add(
        name=name,
        number=int(number),
        label=FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL,
    )
    if bare in schema:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".v1.{bare}"
    else:
        field.type = _SCALARS[bare]
    if kind.startswith("?"):  # proto3 spells "optional" as a oneof of one
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
