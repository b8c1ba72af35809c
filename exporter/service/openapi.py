"""Generates the OpenAPI 3.1 document from the tables by which the service parses requests."""

import json
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, get_args, get_origin, get_type_hints

from exporter import __version__
from exporter.service import api, opencost, responses
from exporter.service.api import Endpoint
from exporter.service.parameters import Parameter

Schema = dict[str, Any]
ENDPOINTS: tuple[Endpoint, ...] = (*api.ENDPOINTS, *opencost.ENDPOINTS)
PLAIN: tuple[tuple[str, str, str], ...] = (
    ("/healthz", "200 while the process lives.", "text/plain"),
    ("/readyz", "200 after the first read of store and Prometheus, else 503.", "text/plain"),
    ("/metrics", "Budgets, this month and the service itself, for Prometheus.", "text/plain"),
    ("/openapi.json", "This document.", "application/json"),
)
_ERRORS = {
    "400": ("NotUnderstood", "A parameter is not understood."),
    "500": ("Broken", "The store or the service is broken."),
    "503": (
        "NotNow",
        "Prometheus cannot be queried now, or too many requests wait; Retry-After has the time of the next try.",
    ),
}


def document(title: str = "GPU cost", prefix: str = "") -> dict[str, Any]:
    """Return the document; ``prefix`` is the prefix of all paths behind a proxy."""
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
            "schemas": _schemas(),
            "parameters": {name: _parameter(parameter) for name, parameter in named.items()},
            "responses": {name: _error(about) for name, about in _ERRORS.values()},
        },
    }


def _schemas() -> dict[str, Schema]:
    """Return the schemas of all documents in answers, and of the documents within them, by name."""
    found: dict[str, Schema] = {}
    for kind in (responses.ErrorDocument, *(endpoint.answer for endpoint in ENDPOINTS)):
        _schema(kind, found)
    return found


def _document(kind: type, found: dict[str, Schema]) -> Schema:
    """Return the schema of a document, and add the schemas of documents within it to ``found``."""
    hints = get_type_hints(kind, include_extras=True)
    optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
    return {
        "type": "object",
        "description": kind.__doc__,
        "properties": {
            name: _schema(get_args(hint)[0] if name in optional else hint, found) for name, hint in hints.items()
        },
        "required": [name for name in hints if name not in optional],
    }


_PRIMITIVES = {float: "number", int: "integer", str: "string", bool: "boolean", type(None): "null"}


def _schema(hint: Any, documents: dict[str, Schema]) -> Schema:  # noqa: ANN401 - any annotation of a document
    """Return the schema of a type; for a document, return a reference, and add its schema to ``documents``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        made = {**_schema(arguments[0], documents), "description": arguments[1]}
    elif origin is Literal and len(arguments) == 1:
        made = {"const": arguments[0]}
    elif origin is Literal:
        made = {"type": _PRIMITIVES[type(arguments[0])], "enum": list(arguments)}
    elif origin is list:
        made = {"type": "array", "items": _schema(arguments[0], documents)}
    elif origin is Mapping:
        values = {} if arguments[1] is Any else {"additionalProperties": _schema(arguments[1], documents)}
        made = {"type": "object", **values}
    elif origin is UnionType:
        several = [_schema(one, documents) for one in arguments]
        simple = all(set(one) == {"type"} for one in several)
        made = {"type": [one["type"] for one in several]} if simple else {"anyOf": several}
    elif hint in _PRIMITIVES:
        made = {"type": _PRIMITIVES[hint]}
    else:
        if name_of(hint) not in documents:
            documents[name_of(hint)] = {}  # keeps its place before the documents within it
            documents[name_of(hint)] = _document(hint, documents)
        made = _reference(hint)
    return made


def _reference(kind: type) -> Schema:
    return {"$ref": f"#/components/schemas/{name_of(kind)}"}


def name_of(kind: type) -> str:
    """Return the name of a document's schema."""
    return kind.__name__.removesuffix("Document")


def _named() -> dict[str, Parameter]:
    """Return every parameter by its name in the document; a second parameter of a name gets the path as a prefix."""
    found: dict[str, Parameter] = {}
    for endpoint in ENDPOINTS:
        for parameter in endpoint.parameters:
            if parameter not in found.values():
                name = parameter.name.replace(":", ".")
                found[f"{_name(endpoint.path)}.{name}" if name in found else name] = parameter
    return found


def _operation(endpoint: Endpoint, named: Mapping[str, Parameter]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _reference(endpoint.answer)}}
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
        is_text = schema["type"] == "string"
        schema["default"] = parameter.default if is_text else json.loads(parameter.default)
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


def _error(about: str) -> dict[str, Any]:
    return {
        "description": about,
        "content": {"application/json": {"schema": _reference(responses.ErrorDocument)}},
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
