"""OpenAPI 3.1 of the service, made from the same tables that requests are read with."""

from collections.abc import Mapping
from typing import Any

from exporter import __version__
from exporter.report.service.api import Endpoint
from exporter.report.service.endpoints import ENDPOINTS
from exporter.report.service.parameters import Parameter
from exporter.report.service.schemas import SCHEMAS

PLAIN: tuple[tuple[str, str, str], ...] = (
    ("/healthz", "200 while the process lives.", "text/plain"),
    ("/readyz", "200 once the first look at store and Prometheus is over, else 503.", "text/plain"),
    ("/metrics", "Budgets, this month and the service itself, for Prometheus.", "text/plain"),
    ("/openapi.json", "This document.", "application/json"),
)
_ERRORS = {
    "400": ("NotUnderstood", "A parameter is not understood."),
    "500": ("Broken", "The store or the service is broken."),
    "503": (
        "NotNow",
        "Prometheus cannot be asked now, or too many questions wait; Retry-After says when to ask again.",
    ),
}


def document(title: str = "GPU cost", prefix: str = "") -> dict[str, Any]:
    """The document; ``prefix`` is that of all paths behind a proxy."""
    named = _named()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"{title}: cost service API",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Read-only. Times are Unix seconds, seconds are GPU-seconds weighted by share, null is not"
            " known. Keys may be added; none is renamed or removed within /api/v1.",
        },
        "servers": [{"url": prefix or "/"}],
        "paths": {
            **{endpoint.path: {"get": _operation(endpoint, named)} for endpoint in ENDPOINTS},
            **{path: {"get": _plain(path, about, kind)} for path, about, kind in PLAIN},
        },
        "components": {
            "schemas": SCHEMAS,
            "parameters": {name: _parameter(parameter) for name, parameter in named.items()},
            "responses": {name: _error(about) for name, about in _ERRORS.values()},
        },
    }


def _named() -> dict[str, Parameter]:
    """Every parameter by its name in the document; where two are called the same, the path comes before it."""
    found: dict[str, Parameter] = {}
    for endpoint in ENDPOINTS:
        for parameter in endpoint.parameters:
            if parameter not in found.values():
                name = parameter.name.replace(":", ".")
                found[f"{_name(endpoint.path)}.{name}" if name in found else name] = parameter
    return found


def _operation(endpoint: Endpoint, named: Mapping[str, Parameter]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{endpoint.schema}"}}}
    content |= {kind: {"schema": {"type": "string"}} for kind in endpoint.other_types}
    errors = {status: {"$ref": f"#/components/responses/{name}"} for status, (name, _) in _ERRORS.items()}
    names = {id(parameter): name for name, parameter in named.items()}
    found = [{"$ref": f"#/components/parameters/{names[id(parameter)]}"} for parameter in endpoint.parameters]
    return {
        "operationId": _name(endpoint.path),
        "summary": endpoint.about,
        "parameters": found,
        "responses": {"200": {"description": "The answer.", "content": content}, **errors},
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    schema = dict(parameter.schema)
    if parameter.default is not None:
        schema["default"] = _default(parameter)
    if parameter.repeatable:
        schema = {"type": "array", "items": schema}
    return {
        "name": parameter.name,
        "in": "query",
        "required": False,
        "description": f"{parameter.about} Allowed: {parameter.allowed}.",
        "schema": schema,
        **({"style": "form", "explode": True} if parameter.repeatable else {}),
    }


def _default(parameter: Parameter) -> str | int | bool | None:
    kind = parameter.schema.get("type")
    if kind == "integer":
        return int(parameter.default or 0)
    return parameter.default == "true" if kind == "boolean" else parameter.default


def _error(about: str) -> dict[str, Any]:
    return {
        "description": about,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }


def _plain(path: str, about: str, kind: str) -> dict[str, Any]:
    schema = {"type": "object" if kind == "application/json" else "string"}
    return {
        "operationId": _name(path),
        "summary": about,
        "responses": {"200": {"description": "The answer.", "content": {kind: {"schema": schema}}}},
    }


def _name(path: str) -> str:
    words = path.removeprefix("/api/v1").replace(".", "/").strip("/").split("/")
    return words[0] + "".join(word.capitalize() for word in words[1:])
