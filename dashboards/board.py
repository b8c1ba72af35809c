"""Builder of a dashboard: variables, links, rows, and the panel ids that the SDK leaves out."""

import json
from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from panels import DATASOURCE, RUNBOOK, Panel

TAG = "gpu-cost-exporter"
LETTERS = "ABCDEFGHIJKL"

Rows = Sequence[tuple[str, Sequence[Panel]]]


def choice(name: str, label: str, expression: str) -> dashboard.QueryVariable:
    """Return a multi-value variable from a label query; the default is all, including series without the label."""
    everything = models.VariableOption(text=["All"], value=["$__all"], selected=True)
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": expression, "refId": "values"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(everything)
    )


def text(name: str, label: str, default: str) -> dashboard.TextBoxVariable:
    """Return a variable with a text field."""
    return (
        dashboard.TextBoxVariable(name)
        .label(label)
        .default_value(default)
        .current(models.VariableOption(text=default, value=default, selected=True))
    )


def board(
    *,
    uid: str,
    title: str,
    description: str,
    time_from: str,
    refresh: str,
    timezone: str,
    variables: Sequence[dashboard.QueryVariable | dashboard.TextBoxVariable],
    rows: Rows,
) -> dict[str, Any]:
    """Return a dashboard as JSON values."""
    builder = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["gpu", TAG])
        .readonly()
        .timezone(timezone)
        .refresh(refresh)
        .time(time_from, "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in variables:
        builder = builder.with_variable(variable)
    builder = builder.with_variable(text("cost_page", "Cost page", "http://localhost:9401"))
    for one in _links():
        builder = builder.link(one)
    for name, panels in rows:
        builder = builder.with_row(dashboard.Row(name))
        for panel in panels:
            builder = builder.with_panel(panel)
    return _numbered(json.loads(JSONEncoder(sort_keys=True).encode(builder.build())))


def _links() -> tuple[dashboard.DashboardLink, ...]:
    return (
        dashboard.DashboardLink("GPU dashboards")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(as_dropdown=False)
        .include_vars(include_vars=True)
        .keep_time(keep_time=True),
        dashboard.DashboardLink("Cost page")
        .type(models.DashboardLinkType.LINK)
        .url("${cost_page}")
        .target_blank(target_blank=True),
        dashboard.DashboardLink("Runbook")
        .type(models.DashboardLinkType.LINK)
        .url(RUNBOOK)
        .target_blank(target_blank=True),
    )


def _numbered(values: dict[str, Any]) -> dict[str, Any]:
    for variable in values["templating"]["list"]:
        for key in ("auto", "auto_count", "auto_min"):  # of intervals alone; the SDK gives them to all
            variable.pop(key, None)
    for number, panel in enumerate(values["panels"], start=1):
        panel["id"] = number
        for letter, target in zip(LETTERS, panel.get("targets", ()), strict=False):
            target["refId"] = letter
    return values
