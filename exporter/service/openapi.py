"""OpenAPI 3.1 of the service, made from the same tables that requests are read with."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import hdrs, web

from exporter import __version__
from exporter.cost.ledger import Now
from exporter.service import api, opencost, responses
from exporter.service.api import Ask, Endpoint
from exporter.service.data import Book
from exporter.service.parameters import Parameter, read
from exporter.service.settings import ServeSettings
from exporter.web.responses import Bodies

Schema = dict[str, Any]


def _known(kind: str, about: str, **more: Any) -> Schema:  # noqa: ANN401 - keywords of JSON Schema
    return {"type": kind, "description": about, **more}


def _maybe(kind: str, about: str, **more: Any) -> Schema:  # noqa: ANN401 - keywords of JSON Schema
    return {"type": [kind, "null"], "description": about, **more}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema, about: str) -> Schema:
    return {"type": "array", "items": items, "description": about}


def _object(about: str, **properties: Schema) -> Schema:
    return {"type": "object", "description": about, "properties": properties, "required": list(properties)}


def _optional(schema: Schema, **properties: Schema) -> Schema:
    return {**schema, "properties": {**schema["properties"], **properties}}


_FIGURES = {
    "allocated_seconds": _known("number", "GPU-seconds weighted by share: active, idle and unknown, always."),
    "active_seconds": _known("number", "Of these at work."),
    "idle_seconds": _known("number", "Of these idle."),
    "unknown_seconds": _known("number", "Of these not measured."),
    "unpriced_seconds": _known("number", "Allocated seconds that had no price and are in no money."),
    "active_ratio": _maybe("number", "Active of what was measured; null where nothing was."),
    "energy_joules": _maybe("number", "Measured energy; null where none was."),
    "money": _list(_ref("Money"), "By currency; empty where nothing was priced."),
}
_NAMES = {
    "cluster": _maybe("string", "Null here and below: not known, or summed over."),
    "node": _maybe("string", "Name of the node."),
    "pool": _maybe("string", "Instance type and capacity type of the node."),
    "owner_namespace": _maybe("string", "Whose it is."),
    "owner_kind": _maybe("string", "Of the workload, or Unallocated, Unattributed."),
    "owner_name": _maybe("string", "Of the workload."),
    "team": _maybe("string", "Who pays."),
    "labels": _maybe("object", "Values by key of the labels that were asked for; null where it has none of them."),
    "model": _maybe("string", "Of the GPU."),
    "mode": _maybe("string", "exclusive, mig or shared."),
}
_PERIOD = {
    "from_seconds": _known("integer", "Start, Unix time."),
    "to_seconds": _known("integer", "End, Unix time; outside of the period."),
}
_NOT_OURS = ("cpuCost", "ramCost", "pvCost", "networkCost", "loadBalancerCost", "sharedCost", "externalCost")
_WARNING = _known(
    "string",
    "What a reader must know, joined by '; ': parameters that were ignored, properties that the ledger does not record,"
    " currencies that were left out, hours that were not recorded, GPU-hours without a price. Absent where there is"
    " nothing of it.",
)
_NODES: Schema = {"type": "object", "additionalProperties": _ref("Asset")}
_TIME = "Unix time; null while it is not known."

SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        "What was wrong, where, and how to mend it.",
        error=_known("string", "What is wrong."),
        where=_known("string", "The parameter, option or address; empty where there is none."),
        mend=_known("string", "How to mend it; empty where it is not known."),
        problems=_list({"type": "object"}, "All problems, each with the three keys above."),
        code=_known("integer", "The HTTP status."),
        message=_known("string", "All of it in one line."),
    ),
    "Window": _object("A period.", **_PERIOD, label=_maybe("string", "As it was asked for.")),
    "Money": _object(
        "Cost in one currency: the parts sum to the cost.",
        currency=_known("string", "ISO 4217."),
        cost=_known("number", "Of all priced seconds."),
        active_cost=_known("number", "Of active seconds."),
        idle_cost=_known("number", "Of idle seconds."),
        unknown_cost=_known("number", "Of unknown seconds."),
    ),
    "Figures": _object("Seconds, energy and money.", **_FIGURES),
    "Line": _optional(
        _object(
            "One line of a report.",
            **_NAMES,
            held=_known("boolean", "False: Unallocated or Unattributed, which are nobody's."),
            **_FIGURES,
        ),
        charges=_list({"type": "object"}, "Where idle money is shared: currency, shared, charged."),
        series=_list(_ref("Figures"), "By period, where it was asked for."),
    ),
    "Trust": _object(
        "How far the report can be trusted.",
        whole=_known("boolean", "Every question was answered and every second is on a line."),
        capacity_seconds=_known("number", "GPU-seconds that were metered; all lines sum to it."),
        missing_seconds=_maybe("number", "What the lines lack of it; null with filters."),
        expected_hours=_known("integer", "Hours of the window that are over, times clusters."),
        recorded_hours=_known("integer", "For how many of them the ledger was recorded."),
        period_coverage_ratio=_maybe("number", "Part of the hours that were recorded."),
        activity_coverage_ratio=_maybe("number", "Part of the held seconds whose activity was measured."),
        price_coverage_ratio=_maybe("number", "Part of all seconds that had a price."),
        failures=_list({"type": "object"}, "What was not read: from_seconds, to_seconds, what, reason."),
        notes=_list({"type": "string"}, "What a reader must know."),
    ),
    "Report": _object(
        "Who used GPUs, how well, and what it cost.",
        api_version={"const": 1},
        window=_ref("Window"),
        by=_list({"type": "string"}, "Dimensions of the lines."),
        filters=_known("object", "By dimension what was asked for."),
        share_idle=_known("string", "How Unallocated money is spread."),
        share_unallocated=_known("boolean", "Whether Unattributed money is, too."),
        lines=_list(_ref("Line"), "Owners' lines, dearest first, then what is nobody's."),
        total=_ref("Figures"),
        periods=_list(_object("A day.", **_PERIOD), "Of the lines' series."),
        trust=_ref("Trust"),
        engine=_maybe("string", "Where it was read."),
        simulated=_known("boolean", "Some of it is of simulated nodes."),
        prices=_maybe("string", "Null: prices of the time of use."),
        paging=_object(
            "Which owners' lines these are.",
            offset=_known("integer", "How many are before."),
            limit=_known("integer", "How many there are at most."),
            lines=_known("integer", "How many owners' lines the report has."),
        ),
    ),
    "Month": _object(
        "This month in one currency.",
        currency=_known("string", "ISO 4217."),
        spent=_known("number", "Month to date: all GPUs, held or not."),
        forecast=_maybe("number", "Of the whole month; null while too little is known."),
        last_month=_maybe("number", "Of the month before; null where it is not wholly known."),
    ),
    "Months": _object("This month.", months=_list(_ref("Month"), "By currency."), freshness=_ref("Freshness")),
    "Freshness": _object(
        "How new what is shown is.",
        now_seconds=_known("number", "Time of the answer, Unix time."),
        first_day_seconds=_maybe("number", f"Start of the oldest day that is known. {_TIME}"),
        closed_until_seconds=_maybe("number", f"End of the newest closed day. {_TIME}"),
        read_until_seconds=_maybe("number", f"End of the newest recorded hour. {_TIME}"),
        problem=_maybe("string", "Why newer hours are not there, with the mend."),
        simulated=_known("boolean", "Some of it is of simulated nodes."),
    ),
    "Funnel": _object(
        "Mean numbers of GPUs over the recorded hours.",
        total=_known("number", "There and metered."),
        allocated=_known("number", "Held by owners."),
        active=_maybe("number", "Held, and at work for 5 % of a quarter of an hour or more, where it is recorded."),
        effective=_known("number", "At work; a GPU that is half busy counts half."),
        unknown=_known("number", "Held and not measured."),
    ),
    "Summary": _object(
        "The fleet in a few numbers.",
        window=_ref("Window"),
        funnel={"anyOf": [_ref("Funnel"), {"type": "null"}]},
        money=_list(
            _object(
                "In one currency: the parts sum to the total.",
                currency=_known("string", "ISO 4217."),
                total=_known("number", "Of all GPUs."),
                active=_known("number", "Of owners' active seconds."),
                idle=_known("number", "Of owners' idle seconds."),
                unknown=_known("number", "Of owners' unknown seconds."),
                unattributed=_known("number", "Held by nobody that is known."),
                unallocated=_known("number", "Held by nobody."),
            ),
            "By currency.",
        ),
        trust=_ref("Trust"),
        months=_list(_ref("Month"), "By currency; without filters."),
        freshness=_ref("Freshness"),
    ),
    "Recommendation": _object(
        "One suggestion.",
        advice=_known("string", "give-back, fewer-gpus, share, smaller-mig or smaller-model."),
        title=_known("string", "What to do."),
        cluster=_NAMES["cluster"],
        owner_namespace=_NAMES["owner_namespace"],
        owner_kind=_NAMES["owner_kind"],
        owner_name=_NAMES["owner_name"],
        team=_NAMES["team"],
        model=_NAMES["model"],
        gpus=_known("number", "Physical GPUs that would become free, by share."),
        currency=_maybe("string", "ISO 4217."),
        per_month=_maybe("number", "Money of 730 hours; null where there was no price."),
        evidence=_list({"type": "string"}, "Measured facts, with window and coverage."),
        risk=_known("string", "What could go wrong, and how to try it."),
        risk_level=_known("string", "How bad that is.", enum=["low", "medium", "high"]),
        devices=_list({"type": "string"}, "UUIDs that it is about."),
    ),
    "Recommendations": _object(
        "Suggestions.",
        recommendations=_list(_ref("Recommendation"), "Dearest first."),
        freshness=_ref("Freshness"),
    ),
    "Budget": _object(
        "A budget and how it stands.",
        name=_known("string", "As its file has it."),
        owner=_known("object", "Whose: by dimension; empty is everybody."),
        period=_known("string", "week, month, quarter or year."),
        currency=_known("string", "ISO 4217."),
        amount=_known("number", "What it allows."),
        include_unallocated=_known("boolean", "Counts Unallocated and Unattributed, too."),
        **_PERIOD,
        spent=_maybe("number", "In this period so far; null where that is not known."),
        projected=_maybe("number", "Of the whole period; null while too little is known."),
        unpriced_seconds=_maybe("number", "GPU-seconds without a price: spent is too low while there are any."),
        thresholds=_list({"type": "number"}, "Parts of the amount that are marked."),
        passed=_list({"type": "number"}, "Those that were reached."),
        as_of_seconds=_known("number", "When it was counted, Unix time."),
        known=_known(
            "boolean", "False: some of it could not be read, or its money is in another currency; spent is null."
        ),
        notes=_list({"type": "string"}, "What is not in it, and why."),
    ),
    "Budgets": _object(
        "Budgets.", budgets=_list(_ref("Budget"), "In the order of their file."), freshness=_ref("Freshness")
    ),
    "Pod": _object(
        "A pod on a device now, or within the last day.",
        cluster=_NAMES["cluster"],
        node=_known("string", "Name of the node."),
        gpu_uuid=_known("string", "Of the physical GPU or instance."),
        gpu_index=_known("string", "On its node."),
        gpu_instance=_maybe("string", "Of MIG."),
        mig_profile=_maybe("string", "Of MIG."),
        model=_NAMES["model"],
        namespace=_known("string", "Of the pod."),
        pod=_known("string", "Its name."),
        container=_maybe("string", "Its container."),
        gpu_share_ratio=_known("number", "Its part of the physical GPU."),
        activity_ratio=_maybe("number", "Now, 0 to 1."),
        idle_for_seconds=_maybe("number", "Measured idle time since it was last active."),
        age_seconds=_maybe("number", "Since it was first seen on the device."),
        memory_used_bytes=_maybe("number", "On the device."),
        cost_per_hour=_list({"type": "object"}, "currency and cost, at the price of now."),
        live=_known("boolean", "False: it has ended."),
    ),
    "Pods": _object("Pods.", pods=_list(_ref("Pod"), "By node and device."), freshness=_ref("Freshness")),
    "Allocations": _optional(
        _object(
            "Rows in the shape of OpenCost's allocation API; see docs/service.md for what differs.",
            code={"const": 200},
            status=_known("string", "success"),
            data=_list(
                {"type": "object", "additionalProperties": _ref("Allocation")}, "A set of rows by name for each step."
            ),
            currency=_maybe("string", "Of all costs; null where there are none."),
        ),
        warning=_WARNING,
    ),
    "Assets": _optional(
        _object(
            "GPUs' cost by node in the shape of OpenCost's assets; see docs/service.md for what differs.",
            code={"const": 200},
            status=_known("string", "success"),
            data={
                "anyOf": [_NODES, {"type": "array", "items": _NODES}],
                "description": "Nodes by name; with filterTypes a list of one such set.",
            },
            currency=_maybe("string", "Of all costs; null where there are none."),
        ),
        warning=_WARNING,
    ),
    "Asset": _object(
        "The GPUs of a node.",
        type={"const": "Node"},
        properties=_known("object", "category, service, cluster, name."),
        labels=_known("object", "Empty."),
        window=_known("object", "start and end, RFC 3339."),
        start=_known("string", "RFC 3339."),
        end=_known("string", "RFC 3339."),
        minutes=_known("number", "Of the window."),
        gpuCount=_known("number", "Mean number of GPUs that were metered."),
        GPUHours=_known("number", "GPU-hours, held or not."),
        gpuCost=_maybe("number", "Of all of them; null where there was no price."),
        cpuCost=_known("number", "0: not of this ledger."),
        ramCost=_known("number", "0: not of this ledger."),
        adjustment=_known("number", "0."),
        totalCost=_maybe("number", "The same as gpuCost."),
    ),
    "Suggestions": _object(
        "Values of a field.",
        code={"const": 200},
        status=_known("string", "success"),
        data=_list({"type": "string"}, "In alphabetical order."),
    ),
    "Configs": _object(
        "Settings that clients of Kubecost ask for.",
        code={"const": 200},
        status=_known("string", "success"),
        data=_object("Settings.", currencyCode=_known("string", "ISO 4217; empty while nothing has a price.")),
    ),
    "Allocation": _object(
        "One row.",
        name=_known("string", "Joined by / from what was aggregated by."),
        properties=_known("object", "What all of the row has in common: cluster, node, namespace, controllerKind, ..."),
        window=_known("object", "start and end, RFC 3339."),
        start=_known("string", "RFC 3339."),
        end=_known("string", "RFC 3339."),
        minutes=_known("number", "Of the set."),
        gpuCount=_known("number", "Mean number of GPUs held, by share."),
        gpuHours=_known("number", "GPU-hours held, by share."),
        gpuCost=_maybe("number", "With what was spread onto it; null where there was no price."),
        gpuCostAdjustment=_known("number", "0."),
        gpuCostIdle=_known("number", "What was spread onto it."),
        gpuEfficiency=_maybe("number", "Active of what was measured; null where nothing was."),
        gpuAllocation=_known("object", "gpuModel; gpuUsageAverage and gpuRequestAverage, both in GPUs."),
        **{name: _known("number", "0: not of this ledger.") for name in _NOT_OURS},
        totalCost=_maybe("number", "The same as gpuCost."),
        totalEfficiency=_maybe("number", "The same as gpuEfficiency."),
    ),
}


ENDPOINTS: tuple[Endpoint, ...] = (*api.ENDPOINTS, *opencost.ENDPOINTS)


def add_endpoints(app: web.Application, book: Book, settings: ServeSettings, clock: Callable[[], float]) -> None:
    """Answer every path of the API; ``clock`` gives Unix seconds."""
    bodies = Bodies()
    for endpoint in ENDPOINTS:
        app.router.add_get(endpoint.path, _handler(endpoint, book, bodies, settings, clock))


def _handler(
    endpoint: Endpoint, book: Book, bodies: Bodies, settings: ServeSettings, clock: Callable[[], float]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        now = clock()
        ignored: list[str] = []
        lenient = ignored if endpoint.ignores_unknown else None
        values = read(endpoint.parameters, request.query.items(), Now(now, settings.timezone), lenient)
        ask = Ask(values=values, book=book, bodies=bodies, settings=settings, now_seconds=now, ignored=tuple(ignored))
        answer = await endpoint.handle(ask)
        headers: dict[str, str] = {}
        if answer.filename:
            headers[hdrs.CONTENT_DISPOSITION] = f'attachment; filename="{answer.filename}"'
        return await responses.respond(request, answer.body, headers=headers)

    return handle


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
