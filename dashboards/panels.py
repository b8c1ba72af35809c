"""Builders of panels with the data source, units and colours that all dashboards share."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    statushistory,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
RUNBOOK = "${cost_page}/runbook"
MONEY = "locale"
"""A number without a currency sign; the currency is in the legend or in a column."""
ALL_DAYS = 1100
"""More points than there are days in three years: a step of a day stays one."""
COLOURS = {
    "Working": "light-green",
    "Active": "green",
    "Unprofiled": "green",
    "Profiled": "semi-dark-green",
    "Effective": "dark-green",
    "Ineffective": "light-orange",
    "Idle": "orange",
    "Unknown": "purple",
    "Unattributed": "red",
    "Unallocated": "blue",
    "Allocated": "yellow",
    "Capacity": "text",
}

Panel = stat.Panel | timeseries.Panel | table.Panel | bargauge.Panel | statetimeline.Panel | statushistory.Panel
Any_ = TypeVar("Any_", bound=Panel)
Target = tuple[str, str]
"""Expression and legend."""


class Column(NamedTuple):
    """A column of a table."""

    field: str
    """A label, or ``Value #A`` of the first query, ``Value #B`` of the second, ..."""
    title: str
    unit: str = ""
    gauge: bool = False
    """Drawn as a bar; of a part of a whole."""
    links: Sequence[Mapping[str, Any]] = ()
    texts: Mapping[str, str] = {}
    """Colours by value."""


def query(expression: str, legend: str = "", *, instant: bool = False, as_table: bool = False) -> prometheus.Dataquery:
    """One target of a panel; ``instant`` asks for the newest value only."""
    target = prometheus.Dataquery().datasource(DATASOURCE).expr(expression).legend_format(legend or "__auto")
    if as_table:
        return target.instant().format(prometheus_models.PromQueryFormat.TABLE)
    return target.instant() if instant else target.range()


def link(title: str, url: str) -> dict[str, Any]:
    """Return a link of a cell or a panel; it opens in a new tab."""
    return {"title": title, "url": url, "targetBlank": True}


_ON_CALL = (
    "/d/gpu-cost-oncall/gpu-on-call?var-datasource=${datasource}&var-node=${__data.fields.Node:percentencode}"
    "&${__url_time_range}"
)
NODE_COLUMNS = (Column("cluster", "Cluster"), Column("node", "Node", links=(link("This node", _ON_CALL),)))
"""Columns of a node, with a link to its on-call dashboard."""
GPU_COLUMNS = (*NODE_COLUMNS, Column("gpu", "GPU"), Column("uuid", "UUID"), Column("model", "Model"))


def steps(*borders: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    """Return colours by lowest value; the first has no lowest value."""
    listed = [models.Threshold(value=value, color=colour) for value, colour in borders]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(listed)


def _headed(panel: Any_, title: str, description: str, unit: str, targets: Sequence[prometheus.Dataquery]) -> Any_:
    panel = panel.title(title).description(description).datasource(DATASOURCE).unit(unit)
    for target in targets:
        panel = panel.with_target(target)
    return panel


def number(
    title: str,
    description: str,
    *targets: Target,
    unit: str = "short",
    bad_from: float | None = None,
    bad_below: float | None = None,
    time_from: str = "",
    decimals: int | None = None,
    span: int = 4,
) -> stat.Panel:
    """Return a panel with one number per target or currency; red from ``bad_from`` up, or below ``bad_below``."""
    colours = steps((None, "green"))
    if bad_from is not None:
        colours = steps((None, "green"), (bad_from, "red"))
    if bad_below is not None:
        colours = steps((None, "red"), (bad_below, "green"))
    named = any(legend for _, legend in targets)
    panel = (
        _headed(stat.Panel(), title, description, unit, [query(*target, instant=True) for target in targets])
        .no_value("-")
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .text_mode(common_models.BigValueTextMode.VALUE_AND_NAME if named else common_models.BigValueTextMode.VALUE)
        .thresholds(colours)
        .height(4)
        .span(span)
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    if time_from:
        panel = panel.time_from(time_from)
    return panel


def bars(
    title: str, description: str, *targets: Target, unit: str = "short", span: int = 8, height: int = 8
) -> bargauge.Panel:
    """Return a panel with the current values as horizontal bars."""
    panel = (
        _headed(bargauge.Panel(), title, description, unit, [query(*target, instant=True) for target in targets])
        .no_value("-")
        .min(0)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .display_mode(common_models.BarGaugeDisplayMode.BASIC)
        .thresholds(steps((None, "green")))
        .height(height)
        .span(span)
    )
    return coloured(panel)


def coloured(panel: Any_) -> Any_:
    """Colour series by the first word of their legend."""
    for word, colour in COLOURS.items():
        panel = panel.override_by_regexp(
            f"/^{word}/", [models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})]
        )
    return panel


def graph(
    title: str,
    description: str,
    *targets: Target,
    unit: str = "short",
    stacked: bool = False,
    none: str = "",
    span: int = 12,
) -> timeseries.Panel:
    """Return a panel with lines over time. ``none``: text for no data, if that is normal."""
    panel = (
        _headed(timeseries.Panel(), title, description, unit, [query(*target) for target in targets])
        .min(0)
        .fill_opacity(20 if stacked else 5)
        .show_points(common_models.VisibilityMode.AUTO)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
        .height(8)
        .span(span)
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if none:
        panel = panel.no_value(none)
    if unit == "percentunit" and not stacked:
        panel = panel.max(1)
    return coloured(panel)


def periods(
    title: str, description: str, step: str, *targets: Target, unit: str = MONEY, time_from: str = "", span: int = 12
) -> timeseries.Panel:
    """Return a panel of stacked bars per day or hour; the query step is fixed, for any range of the dashboard."""
    panel = (
        graph(title, description, *targets, unit=unit, stacked=True, span=span)
        .draw_style(common_models.GraphDrawStyle.BARS)
        .fill_opacity(80)
        .line_width(0)
        .bar_alignment(common_models.BarAlignment.AFTER)
        .show_points(common_models.VisibilityMode.NEVER)
        .interval(step)
        .max_data_points(ALL_DAYS)
    )
    return panel.time_from(time_from) if time_from else panel


def states(
    title: str,
    description: str,
    *targets: Target,
    texts: Mapping[str, tuple[str, str]],
    span: int = 24,
    none: str = "None",
) -> statetimeline.Panel:
    """Return a panel with states over time, a strip per series; ``texts``: word and colour by value."""
    mapped = {value: models.ValueMappingResult(text=text, color=colour) for value, (text, colour) in texts.items()}
    return (
        _headed(statetimeline.Panel(), title, description, "short", [query(*target) for target in targets])
        .no_value(none)
        .mappings([models.ValueMap(options=mapped)])
        .merge_values(merge_values=True)
        .show_value(common_models.VisibilityMode.NEVER)
        .row_height(0.8)
        .fill_opacity(80)
        .line_width(0)
        .per_page(30)
        .height(9)
        .span(span)
    )


def heat(title: str, description: str, target: Target) -> statushistory.Panel:
    """Return a panel with a row per series, coloured by its value from 0 to 1."""
    return (
        _headed(statushistory.Panel(), title, description, "percentunit", [query(*target)])
        .min(0)
        .max(1)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.CONTINUOUS_RD_YL_GR))
        .show_value(common_models.VisibilityMode.NEVER)
        .row_height(0.9)
        .max_data_points(120)
        .per_page(40)
        .height(10)
        .span(24)
    )


def grid(
    title: str,
    description: str,
    expressions: Sequence[str],
    columns: Sequence[Column],
    *,
    sort: str,
    ascending: bool = False,
    none: str = "None",
    span: int = 24,
) -> table.Panel:
    """Return a table of instant queries joined on their labels, without rows that the first query lacks."""
    targets = [query(expression, as_table=True) for expression in expressions]
    names = {column.field: column.title for column in columns}
    if "Value #A" in names:
        names["Value"] = names["Value #A"]  # the name if no other query returns data
    panel = (
        _headed(table.Panel(), title, description, "short", targets)
        .no_value(none)
        .filterable(filterable=True)
        .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            models.DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": list(names)}})
        )
    )
    if len(expressions) > 1:
        has_first = {"fieldName": "Value #A", "config": {"id": "isNotNull", "options": {}}}
        options = {"type": "include", "match": "all", "filters": [has_first]}
        panel = panel.with_transformation(models.DataTransformerConfig(id_val="filterByValue", options=options))
    organised = {
        "indexByName": {field: place for place, field in enumerate(names)},
        "renameByName": names,
    }
    panel = panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=organised))
    for column in columns:
        properties = list(_properties(column))
        if properties:
            panel = panel.override_by_name(column.title, properties)
    order = common.TableSortByFieldState().display_name(sort).desc(desc=not ascending)
    return panel.sort_by([order]).height(9).span(span)


def _properties(column: Column) -> list[models.DynamicConfigValue]:
    found = []
    if column.unit:
        found.append(models.DynamicConfigValue(id_val="unit", value=column.unit))
    if column.gauge:
        found += [
            models.DynamicConfigValue(id_val="min", value=0),
            models.DynamicConfigValue(id_val="max", value=1),
            models.DynamicConfigValue(
                id_val="custom.cellOptions", value={"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}
            ),
        ]
    if column.links:
        found.append(models.DynamicConfigValue(id_val="links", value=list(column.links)))
    if column.texts:
        results = {value: {"color": colour, "text": value} for value, colour in column.texts.items()}
        found += [
            models.DynamicConfigValue(id_val="mappings", value=[{"type": "value", "options": results}]),
            models.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}),
        ]
    return found
