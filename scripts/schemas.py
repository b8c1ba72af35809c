"""Writes the schemas of custom resources from their CRDs; kubernetes-validate has those of Kubernetes.

Usage: schemas.py FOLDER CRD_FILE...
"""

import json
import sys
from pathlib import Path

import yaml


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


def custom(folder: Path, path: Path) -> None:
    """Write files such as ``podmonitor-monitoring-v1.json``, one for each version of a CRD."""
    definition = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
    folder.mkdir(parents=True, exist_ok=True)
    for version in definition["versions"]:
        name = f"{definition['names']['kind']}-{definition['group'].partition('.')[0]}-{version['name']}".lower()
        schema = closed(version["schema"]["openAPIV3Schema"])
        (folder / f"{name}.json").write_text(json.dumps(schema), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write all schemas."""
    for name in arguments[1:]:
        custom(Path(arguments[0]), Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
