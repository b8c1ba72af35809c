"""Writes the schemas for kubeconform: those of Kubernetes from kubernetes-validate, others from their CRDs.

Usage: schemas.py FOLDER [CRD_FILE...]
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

Schema = dict[str, Any]
VERSIONS = ("1.27", "1.37")
"""The oldest and the newest Kubernetes that the manifests support."""
KINDS = (
    "clusterrole-rbac-v1",
    "clusterrolebinding-rbac-v1",
    "configmap-v1",
    "daemonset-apps-v1",
    "deployment-apps-v1",
    "namespace-v1",
    "networkpolicy-networking-v1",
    "persistentvolumeclaim-v1",
    "poddisruptionbudget-policy-v1",
    "priorityclass-scheduling-v1",
    "resourceclaimtemplate-resource-v1",
    "resourcequota-v1",
    "role-rbac-v1",
    "rolebinding-rbac-v1",
    "secret-v1",
    "service-v1",
    "serviceaccount-v1",
    "statefulset-apps-v1",
)
_REFERENCE = re.compile(r"^(?:/api/_definitions\.json)?#/\$defs/(.+)$")


def references(schema: object) -> Iterator[Schema]:
    """Yield every part that refers to a definition."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema
        for value in schema.values():
            yield from references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from references(value)


def standalone(schema: Schema, definitions: Schema) -> Schema:
    """Return the schema with all definitions that it refers to, directly or indirectly."""
    taken: Schema = {}
    left = [schema]
    while left:
        for part in references(left.pop()):
            found = _REFERENCE.match(part["$ref"])
            if found is None:
                continue
            name = found[1]
            part["$ref"] = f"#/$defs/{name}"
            if name not in taken:
                taken[name] = json.loads(json.dumps(definitions[name]))
                left.append(taken[name])
    return schema | {"$defs": taken}


def closed(schema: object, *, nested: bool = False) -> object:
    """Return the schema of a custom resource without unknown keys, because an API server drops those silently."""
    if isinstance(schema, list):
        return [closed(part, nested=nested) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: closed(value, nested=True) for key, value in schema.items()}
    named = isinstance(out.get("properties"), dict) and "type" in out and nested
    if named and "additionalProperties" not in out and not out.get("x-kubernetes-preserve-unknown-fields"):
        out["additionalProperties"] = False
    return out


def built_in(folder: Path) -> None:
    """Write files such as ``v1.27/daemonset-apps-v1.json``, without kinds that the version does not have."""
    base = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    for version in VERSIONS:
        source, target = base / f"v{version}.0-local-strict", folder / f"v{version}.0"
        target.mkdir(parents=True, exist_ok=True)
        definitions = json.loads((source / "_definitions.json").read_text(encoding="utf-8"))["$defs"]
        for kind in KINDS:
            path = source / f"{kind}.json"
            if path.exists():
                schema = standalone(json.loads(path.read_text(encoding="utf-8")), definitions)
                (target / path.name).write_text(json.dumps(schema), encoding="utf-8")


def custom(folder: Path, path: Path) -> None:
    """Write files such as ``crd/podmonitor-monitoring-v1.json``, one for each version of a CRD."""
    definition = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
    target = folder / "crd"
    target.mkdir(parents=True, exist_ok=True)
    for version in definition["versions"]:
        name = f"{definition['names']['kind']}-{definition['group'].partition('.')[0]}-{version['name']}".lower()
        schema = closed(version["schema"]["openAPIV3Schema"])
        (target / f"{name}.json").write_text(json.dumps(schema), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write all schemas."""
    folder = Path(arguments[0])
    built_in(folder)
    for name in arguments[1:]:
        custom(folder, Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
