"""JSON held against its schema. The libraries take two seconds to load, and every test process collects every file."""

# ruff: noqa: PLC0415

from collections.abc import Mapping
from typing import Any


def problems(document: Any, schema: Mapping[str, Any]) -> list[str]:  # noqa: ANN401 - JSON of any shape
    """What a schema finds wrong; one that names no draft is of the newest."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    check = validator_for(schema, default=Draft202012Validator)(schema)
    return [error.message for error in check.iter_errors(document)]


def schema_problems(schema: Mapping[str, Any]) -> list[str]:
    """What is wrong with a schema itself."""
    from jsonschema import Draft202012Validator

    return problems(schema, Draft202012Validator.META_SCHEMA)


def bill_problem(text: str) -> object:
    """What CycloneDX's strict schema finds wrong with a bill of materials; ``None`` if nothing."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
