import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from files_support import schema_problems

from exporter.cost.window import Now
from exporter.service.openapi import ENDPOINTS, PLAIN, document
from exporter.service.parameters import read

ROOT = Path(__file__).resolve().parent.parent


def resolved(node: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Return the target of a reference."""
    if "$ref" not in node:
        return node
    found: Any = root
    for part in node["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return dict(found)


def references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in references(value)]
    return [ref for value in node for ref in references(value)] if isinstance(node, list) else []


def test_openapi_document_matches_the_tables() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/openapi_doc.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_every_path_and_parameter_is_in_the_document() -> None:
    root = document()
    assert set(root["paths"]) == {endpoint.path for endpoint in ENDPOINTS} | {path for path, _, _ in PLAIN}
    for endpoint in ENDPOINTS:
        reported = root["paths"][endpoint.path]["get"]["parameters"]
        names = [resolved(parameter, root)["name"] for parameter in reported]
        assert names == [parameter.name for parameter in endpoint.parameters]


def test_every_reference_resolves_and_every_component_is_referenced() -> None:
    root = document()
    for reference in references(root):
        assert resolved({"$ref": reference}, root)
    referred = {reference.rsplit("/", 1)[1] for reference in references(root)}
    assert referred == set(root["components"]["schemas"]) | set(root["components"]["parameters"]) | set(
        root["components"]["responses"]
    )


def test_operation_ids_are_unique_and_every_path_has_a_200_answer() -> None:
    root = document()
    operations = [path["get"] for path in root["paths"].values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert all(operation["summary"].endswith(".") and operation["responses"]["200"] for operation in operations)


def test_schemas_are_valid_json_schema() -> None:
    for schema in document()["components"]["schemas"].values():
        assert not schema_problems(schema)


def test_documented_defaults_match_the_effective_ones() -> None:
    root = document()
    for endpoint in ENDPOINTS:
        values = read(endpoint.parameters, [], Now(1_790_000_000.0))
        for parameter in endpoint.parameters:
            reported = root["paths"][endpoint.path]["get"]["parameters"]
            schema = next(one for ref in reported if (one := resolved(ref, root))["name"] == parameter.name)["schema"]
            if "default" in schema:
                given = read(endpoint.parameters, [(parameter.name, _text(schema["default"]))], Now(1_790_000_000.0))
                assert given[parameter.name] == values[parameter.name]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
