"""GPU FinOps dashboard: cost of the fleet by owner, waste, budgets, and completeness of the data."""

from typing import Any

from board import Rows, board, choice
from fleet import TO_OWNER, TO_PODS
from grafana_foundation_sdk.builders import dashboard
from panels import MONEY, Column, Panel, bars, graph, grid, link, number, periods
from promql import (
    CLUSTER,
    DAY,
    HELD,
    HELD_IN_CLUSTER,
    HOUR,
    RANGE,
    STEPS,
    WORKLOAD,
    Window,
    gained,
    hours_recorded,
    of_one_currency,
    of_top,
    steps,
)

CHOSEN = f'{CLUSTER},workload_namespace=~"$namespace",team=~"$team",model=~"$model"'
HELD_BY = f"{CHOSEN},{HELD}"
RECOMMENDATIONS = "${cost_page}/recommendations"
WEEK = Window("7d", "-20m", "7d1h")
REST_OF_MONTH_HOURS = "scalar((days_in_month() - day_of_month() + 1) * 24 - hour() - minute() / 60)"
BUDGET = "cluster, budget, period, currency, team, workload_namespace"
HOURS = "GPU-hours"


PARTS = (
    *(
        (name, f'{HELD_IN_CLUSTER},state="active_{name.lower()}"')
        for name in ("Effective", "Ineffective", "Unprofiled")
    ),
    ("Idle", f'{HELD_IN_CLUSTER},state="idle"'),
    ("Unknown", f'{HELD_IN_CLUSTER},state="unknown"'),
    *((kind, f'{CLUSTER},workload_kind="{kind}"') for kind in ("Unattributed", "Unallocated")),
)
"""States of GPU time with their matchers; together they are the whole capacity."""
STEPS_MEAN = (
    "Active, Profiled and Effective are each a part of the one before: active; all resources of the GPU measured; at "
    "the limit of one. Active time that was not profiled may be effective. Empty: not measured."
)
IDLE, UNALLOCATED = dict(PARTS)["Idle"], dict(PARTS)["Unallocated"]


def _money(window: Window, matchers: str = CLUSTER) -> str:
    """Return the cost by currency of all owners, Unallocated and Unattributed included, or of those that match."""
    return gained("cost", "currency", window, matchers)


def _forecast() -> str:
    """Return the month's cost to date plus, for the rest of the month, the mean hourly cost of the last seven days."""
    week = gained("cost", "cluster, currency", WEEK, CLUSTER)
    rest = f"sum by (currency) ({week} / on (cluster) group_left () {hours_recorded(WEEK)}) * {REST_OF_MONTH_HOURS}"
    return f"{_money(RANGE)} + on (currency) ({rest}) or {rest}"


def _sum(title: str, description: str, expression: str, since: str) -> Panel:
    return number(title, description, (expression, "{{currency}}"), unit=MONEY, time_from=since, decimals=2)


def _month() -> list[Panel]:
    held = "all owners, Unallocated and Unattributed included."
    return [
        _sum("Today", f"Since midnight UTC, up to the last recorded hour: {held}", _money(RANGE), "now/d"),
        _sum(
            "Month to date",
            f"Since the first of the month, UTC, up to the last recorded hour: {held}",
            _money(RANGE),
            "now/M",
        ),
        _sum(
            "Forecast for the month",
            "Month to date, plus the mean hourly cost of the last seven days for the rest of the month. The forecast "
            "of the cost service also uses weekdays.",
            _forecast(),
            "now/M",
        ),
        _sum(
            "Idle, month to date",
            "Cost of the idle time of allocated GPUs.",
            _money(RANGE, IDLE),
            "now/M",
        ),
        _sum(
            "Unallocated, month to date",
            "Cost of unallocated GPUs.",
            _money(RANGE, UNALLOCATED),
            "now/M",
        ),
        number(
            "Month, from the cost service",
            "All clusters of the service, closed days included: month to date, forecast by weekday, and the previous "
            "month. Empty if Prometheus does not scrape the service.",
            *(
                (f"max by (currency) (gpu_cost_{name})", words + " {{currency}}")
                for name, words in (
                    ("month_to_date", "to date"),
                    ("month_forecast", "forecast"),
                    ("last_month", "previous month"),
                )
            ),
            unit=MONEY,
            decimals=2,
        ),
    ]


def _stack(window: Window) -> list[tuple[str, str]]:
    """Return the cost by state."""
    return [(_money(window, matchers), name + " {{currency}}") for name, matchers in PARTS]


def _over_time() -> list[Panel]:
    return [
        periods(
            "Cost by day",
            "One bar per day (UTC), the last one up to now. Effective: active and near a limit of the hardware. "
            "Unprofiled: active, with some resources not measured. Unknown: allocated, activity not measured.",
            "1d",
            *_stack(DAY),
            span=24,
        ),
        periods("Cost by hour", "The same for the last two days.", "1h", *_stack(HOUR), time_from="now-2d"),
        periods(
            "GPU-hours by day",
            "One bar per day (UTC), the last one up to now; the states add up to the recorded capacity.",
            "1d",
            *((f"sum({gained('seconds', 'cluster', DAY, matchers)}) / 3600", name) for name, matchers in PARTS),
            unit="short",
        ),
        graph(
            "Idle part of allocated cost",
            "Idle cost divided by the cost of allocated GPUs, by day.",
            (f"{_money(DAY, IDLE)} / {_money(DAY, HELD_IN_CLUSTER)}", "{{currency}}"),
            unit="percentunit",
        )
        .interval("1d")
        .max_data_points(1100),
        graph(
            "Energy by day",
            "Energy of allocated GPUs in kWh.",
            (f"sum({gained('energy_joules', 'cluster', DAY)}) / 3600000", "energy"),
            unit="kwatth",
        )
        .interval("1d")
        .max_data_points(1100),
    ]


def _steps(by: str, matchers: str) -> tuple[str, ...]:
    """Return the active, profiled and effective cost and GPU-hours."""
    hours = (f"({expression}) / 3600" for expression in steps("seconds", by, matchers))
    return (*steps("cost", f"{by}, currency", matchers), *hours)


MONEY_STEPS = tuple(Column(f"Value #{letter}", name, MONEY) for letter, name in zip("EFG", STEPS, strict=True))
HOUR_STEPS = tuple(Column(f"Value #{letter}", f"{name} {HOURS}") for letter, name in zip("HIJ", STEPS, strict=True))
"""Columns of ``_steps``: the fifth to tenth query of a table."""


def _by(label: str, title: str, variable: str, links: tuple[dict[str, Any], ...] = ()) -> Panel:
    held = f'{HELD_IN_CLUSTER},{label}=~"${variable}"'
    cost = gained("cost", f"{label}, currency", RANGE, held)
    idle = gained("cost", f"{label}, currency", RANGE, f'{held},state="idle"')
    hours = f"{gained('seconds', label, RANGE, held)} / 3600"
    return grid(
        f"By {title.lower()}",
        f"Cost and GPU-hours of allocated GPUs in the range, by {title.lower()}; an empty name means none is set. "
        "Share: part of the cost in that currency. Idle: part of the cost that is for idle time. " + STEPS_MEAN,
        [
            cost,
            f"{cost} / on (currency) group_left () sum by (currency) ({cost})",
            f"{idle} / {cost}",
            hours,
            *_steps(label, held),
        ],
        [
            Column(label, title, links=links),
            Column("Value #A", "Cost", MONEY),
            Column("currency", "Currency"),
            Column("Value #B", "Share", "percentunit", gauge=True),
            *MONEY_STEPS,
            Column("Value #C", "Idle", "percentunit", gauge=True),
            Column("Value #D", HOURS),
            *HOUR_STEPS,
        ],
        sort="Cost",
        none="No priced GPU was allocated",
    ).height(8)


def _who() -> list[Panel]:
    pods = link("Pods of the namespace", TO_PODS)
    service = link("Cost page", "${cost_page}/owner?namespace=${__data.fields.Namespace:percentencode}")
    return [
        _by("team", "Team", "team"),
        _by("workload_namespace", "Namespace", "namespace", (pods, service)),
        _by("model", "Model", "model"),
    ]


def _funnel() -> list[Panel]:
    names = ("Capacity", "Allocated", *STEPS)
    hours, money = (
        (*(gained(quantity, by, RANGE, matchers) for matchers in (CHOSEN, HELD_BY)), *steps(quantity, by, HELD_BY))
        for quantity, by in (("seconds", ""), ("cost", "currency"))
    )
    return [
        bars(
            "GPU-hours from capacity to effective",
            f"In the range. Capacity: all metered time, or with a filter the time that its owners held. {STEPS_MEAN}",
            *((f"({expression}) / 3600", name) for name, expression in zip(names, hours, strict=True)),
            span=9,
            height=7,
        ),
        bars(
            "Cost from capacity to effective",
            "The same as cost, by currency, of GPUs with a price.",
            *((expression, name + " {{currency}}") for name, expression in zip(names, money, strict=True)),
            unit=MONEY,
            span=9,
            height=7,
        ),
    ]


def _waste() -> list[Panel]:
    by, idle = f"{WORKLOAD}, currency", f'{HELD_BY},state="idle"'
    top = f"topk by (currency) (20, {gained('cost', by, RANGE, idle)})"
    hours = gained("seconds", WORKLOAD, RANGE, HELD_BY)
    columns = (
        gained("cost", by, RANGE, HELD_BY),
        f"{gained('seconds', WORKLOAD, RANGE, idle)} / {hours}",
        f"{hours} / 3600",
        *_steps(WORKLOAD, HELD_BY),
    )
    return [
        *_funnel(),
        number(
            "Possible saving",
            "Idle cost in the range for the selected clusters, namespaces, teams and models. Recommendations on the "
            "cost page list the action and its risk for each workload.",
            (_money(RANGE, idle), "{{currency}}"),
            unit=MONEY,
            decimals=2,
            span=6,
        )
        .height(7)
        .links([dashboard.DashboardLink("Recommendations").url(RECOMMENDATIONS).target_blank(target_blank=True)]),
        grid(
            "Top 20 by idle cost",
            f"Workloads with the highest idle cost in the range, 20 of each currency. {STEPS_MEAN}",
            [top, *(of_top(column, top) for column in columns)],
            [
                Column("workload_name", "Workload", links=(link("Cost page", TO_OWNER),)),
                Column("workload_kind", "Kind"),
                Column("workload_namespace", "Namespace", links=(link("Pods of the namespace", TO_PODS),)),
                Column("team", "Team"),
                Column("Value #A", "Idle cost", MONEY),
                Column("Value #B", "Cost", MONEY),
                Column("currency", "Currency"),
                *MONEY_STEPS,
                Column("Value #C", "Idle part", "percentunit", gauge=True),
                Column("Value #D", HOURS),
                *HOUR_STEPS,
            ],
            sort="Idle cost",
            none="No allocated GPU was idle",
        ).height(12),
    ]


def _budgets() -> list[Panel]:
    def of(name: str) -> str:
        return f"max by ({BUDGET}) (gpu_budget_{name})"

    return [
        grid(
            "Budgets",
            "Limit, cost to date and projected cost of the period, from the cost service. Empty if there are no "
            "budgets, or if Prometheus does not scrape the service.",
            [
                of("limit"),
                of("spent"),
                of("projected"),
                f"{of('spent')} / ({of('limit')} > 0)",
                f"{of('projected')} / ({of('limit')} > 0)",
                f"({of('period_end_timestamp_seconds')} - time())",
            ],
            [
                Column("budget", "Budget", links=(link("Cost page", "${cost_page}/budgets"),)),
                Column("period", "Period"),
                Column("cluster", "Cluster"),
                Column("team", "Team"),
                Column("workload_namespace", "Namespace"),
                Column("Value #A", "Limit", MONEY),
                Column("Value #B", "Spent", MONEY),
                Column("Value #C", "Projected", MONEY),
                Column("currency", "Currency"),
                Column("Value #D", "Spent part", "percentunit", gauge=True),
                Column("Value #E", "Projected part", "percentunit", gauge=True),
                Column("Value #F", "Ends in", "s"),
            ],
            sort="Projected part",
            none="No budgets",
        ).height(7)
    ]


def _trust() -> list[Panel]:
    held = gained("seconds", "cluster", RANGE)
    known = gained("seconds", "cluster", RANGE, f'{HELD_IN_CLUSTER},state!="unknown"')
    unpriced = gained("unpriced_seconds", "cluster, model", RANGE)
    by_model = gained("seconds", "cluster, model", RANGE)
    joules = gained("energy_joules", "cluster, model", RANGE)
    priced = f"({by_model} - ({unpriced} or 0 * {by_model}))"
    return [
        number(
            "Hours recorded",
            "Part of the hours in the range that are in the ledger, for the cluster with the fewest. Cost of missing "
            "hours is in no sum.",
            (f"clamp_max(min({hours_recorded(RANGE)}) / ($__range_s / 3600), 1)", ""),
            unit="percentunit",
            bad_below=0.9,
            decimals=1,
        ),
        number(
            "Price known",
            "Part of the allocated GPU-hours with a price. Cost of the others is missing from all sums; it is not 0.",
            (f"sum({priced}) / sum({held})", ""),
            unit="percentunit",
            bad_below=0.99,
            decimals=1,
        ),
        number(
            "Activity known",
            "Part of the allocated GPU-hours with measured activity.",
            (f"(sum({known}) or vector(0)) / sum({held})", ""),
            unit="percentunit",
            bad_below=0.9,
            decimals=1,
        ),
        number(
            "Cost per GPU-hour",
            "Cost of an allocated GPU-hour, by model. Absent if a model has prices in several currencies in one "
            "cluster.",
            (of_one_currency(priced, RANGE, 3600), "{{model}} {{currency}}"),
            unit=MONEY,
            decimals=2,
            span=6,
        ),
        number(
            "Cost per kWh",
            "Cost of allocated GPUs per kWh that they used, by model. Absent as for GPU-hours, and where energy was "
            "not measured.",
            (of_one_currency(joules, RANGE, 3_600_000), "{{model}} {{currency}}"),
            unit=MONEY,
            decimals=2,
            span=6,
        ),
    ]


def build() -> dict[str, Any]:
    """Return the dashboard as JSON values."""
    rows: Rows = (
        ("This month, UTC (filter: Cluster)", _month()),
        ("Over time (filter: Cluster)", _over_time()),
        ("Owners (filters: Cluster, and that of each table)", _who()),
        ("Waste (filters: Cluster, Namespace, Team, Model)", _waste()),
        ("Budgets (no filter)", _budgets()),
        ("Data quality (filter: Cluster)", _trust()),
    )
    return board(
        uid="gpu-cost-finops",
        title="GPU FinOps",
        description="Cost of the fleet by owner, waste, budgets, and data quality. Days are UTC, as in the ledger, in "
        "reports and on the cost page.",
        time_from="now-30d",
        refresh="15m",
        timezone="utc",
        variables=(
            choice("cluster", "Cluster", "label_values(cluster:gpu_capacity_seconds:delta1h, cluster)"),
            choice(
                "namespace",
                "Namespace",
                f"label_values(workload:gpu_ledger:delta1h{{{CLUSTER}}}, workload_namespace)",
            ),
            choice("team", "Team", f"label_values(workload:gpu_ledger:delta1h{{{CLUSTER}}}, team)"),
            choice("model", "Model", f"label_values(workload:gpu_ledger:delta1h{{{CLUSTER}}}, model)"),
        ),
        rows=rows,
    )
