"""GPU FinOps: what the fleet costs, whose it is, what of it is waste, and how far to trust it."""

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
"""What becomes of GPUs, with matchers; together they are all there is."""
STEPS_MEAN = (
    "Active, Profiled and Effective are each a part of the one before: at work; all resources of the GPU measured; at "
    "the limit of one. Active and not profiled may be effective or not. Empty: not measured."
)
IDLE, UNALLOCATED = dict(PARTS)["Idle"], dict(PARTS)["Unallocated"]


def _money(window: Window, matchers: str = CLUSTER) -> str:
    """By currency: held, Unallocated and Unattributed, or what matches."""
    return gained("cost", "currency", window, matchers)


def _forecast() -> str:
    """This month's money, and for its rest what an hour of the last seven days cost, of those that were recorded."""
    week = gained("cost", "cluster, currency", WEEK, CLUSTER)
    rest = f"sum by (currency) ({week} / on (cluster) group_left () {hours_recorded(WEEK)}) * {REST_OF_MONTH_HOURS}"
    return f"{_money(RANGE)} + on (currency) ({rest}) or {rest}"


def _sum(title: str, description: str, expression: str, since: str) -> Panel:
    return number(title, description, (expression, "{{currency}}"), unit=MONEY, time_from=since, decimals=2)


def _month() -> list[Panel]:
    held = "held, Unallocated and Unattributed."
    return [
        _sum("Today", f"Since midnight UTC, until the last recorded hour: {held}", _money(RANGE), "now/d"),
        _sum(
            "Month to date",
            f"Since the first of the month, UTC, until the last recorded hour: {held}",
            _money(RANGE),
            "now/M",
        ),
        _sum(
            "Forecast of the month",
            "Month to date, and for the rest what an hour of the last seven days cost. The cost service's knows "
            "weekdays.",
            _forecast(),
            "now/M",
        ),
        _sum(
            "Idle, month to date",
            "Of what was held: money for time in which it did nothing.",
            _money(RANGE, IDLE),
            "now/M",
        ),
        _sum(
            "Unallocated, month to date",
            "Money for GPUs that nobody held.",
            _money(RANGE, UNALLOCATED),
            "now/M",
        ),
        number(
            "Month, as the cost service has it",
            "Of all clusters that it reads, by weekdays and with closed days: month to date, forecast, and the month "
            "before. Empty where Prometheus does not scrape the service.",
            *(
                (f"max by (currency) (gpu_cost_{name})", words + " {{currency}}")
                for name, words in (
                    ("month_to_date", "to date"),
                    ("month_forecast", "forecast"),
                    ("last_month", "month before"),
                )
            ),
            unit=MONEY,
            decimals=2,
        ),
    ]


def _stack(window: Window) -> list[tuple[str, str]]:
    """Money by what became of the GPUs."""
    return [(_money(window, matchers), name + " {{currency}}") for name, matchers in PARTS]


def _over_time() -> list[Panel]:
    return [
        periods(
            "Money by day",
            "A bar for each day (UTC), the last one until now. Effective: active, near a limit of the hardware; "
            "unprofiled: active, and not every resource was measured. Unknown: held, and nobody could measure whether "
            "it worked.",
            "1d",
            *_stack(DAY),
            span=24,
        ),
        periods("Money by hour", "The same of the last two days.", "1h", *_stack(HOUR), time_from="now-2d"),
        periods(
            "GPU-hours by day",
            "A bar for each day (UTC), the last one until now; together they are the capacity that was recorded.",
            "1d",
            *((f"sum({gained('seconds', 'cluster', DAY, matchers)}) / 3600", name) for name, matchers in PARTS),
            unit="short",
        ),
        graph(
            "Idle part of what was held",
            "Day by day: idle money as a part of the money of what pods held.",
            (f"{_money(DAY, IDLE)} / {_money(DAY, HELD_IN_CLUSTER)}", "{{currency}}"),
            unit="percentunit",
        )
        .interval("1d")
        .max_data_points(1100),
        graph(
            "Energy by day",
            "Used by what was held, in kWh.",
            (f"sum({gained('energy_joules', 'cluster', DAY)}) / 3600000", "energy"),
            unit="kwatth",
        )
        .interval("1d")
        .max_data_points(1100),
    ]


def _steps(by: str, matchers: str) -> tuple[str, ...]:
    """What was active, profiled and effective, in money and in GPU-hours."""
    hours = (f"({expression}) / 3600" for expression in steps("seconds", by, matchers))
    return (*steps("cost", f"{by}, currency", matchers), *hours)


MONEY_STEPS = tuple(Column(f"Value #{letter}", name, MONEY) for letter, name in zip("EFG", STEPS, strict=True))
HOUR_STEPS = tuple(Column(f"Value #{letter}", f"{name} {HOURS}") for letter, name in zip("HIJ", STEPS, strict=True))
"""Columns of ``_steps``, which are the fifth to tenth query of a table."""


def _by(label: str, title: str, variable: str, links: tuple[dict[str, Any], ...] = ()) -> Panel:
    held = f'{HELD_IN_CLUSTER},{label}=~"${variable}"'
    cost = gained("cost", f"{label}, currency", RANGE, held)
    idle = gained("cost", f"{label}, currency", RANGE, f'{held},state="idle"')
    hours = f"{gained('seconds', label, RANGE, held)} / 3600"
    return grid(
        f"By {title.lower()}",
        f"Money and GPU-hours of what pods held in the range, by {title.lower()}; an empty name is what has none. "
        "Share: of this table's money in that currency. Idle: the part of it for time in which nothing was done. "
        + STEPS_MEAN,
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
        none="Nothing was held and priced",
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
            f"Of the range. Capacity: all that was metered; of a namespace or team what it held. {STEPS_MEAN}",
            *((f"({expression}) / 3600", name) for name, expression in zip(names, hours, strict=True)),
            span=9,
            height=7,
        ),
        bars(
            "Money from capacity to effective",
            "The same in money, by currency, of what had a price.",
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
            "Could be saved",
            "Idle money of the range, of the clusters, namespaces, teams and models chosen. What to do about it, "
            "workload by workload and with its risk, is on the cost page: Recommendations.",
            (_money(RANGE, idle), "{{currency}}"),
            unit=MONEY,
            decimals=2,
            span=6,
        )
        .height(7)
        .links([dashboard.DashboardLink("Recommendations").url(RECOMMENDATIONS).target_blank(target_blank=True)]),
        grid(
            "Top 20 by idle money",
            f"Workloads that lost most money to idle GPUs in the range, twenty of each currency. {STEPS_MEAN}",
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
            none="Nothing was idle",
        ).height(12),
    ]


def _budgets() -> list[Panel]:
    def of(name: str) -> str:
        return f"max by ({BUDGET}) (gpu_budget_{name})"

    return [
        grid(
            "Budgets",
            "As the cost service has them: what the period may cost, what it has cost, and what it will have cost. "
            "Empty where there are none, or Prometheus does not scrape the service.",
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
            "Part of the range's hours that the ledger has, of the cluster that has fewest. Money of the others is in "
            "no sum here.",
            (f"clamp_max(min({hours_recorded(RANGE)}) / ($__range_s / 3600), 1)", ""),
            unit="percentunit",
            bad_below=0.9,
            decimals=1,
        ),
        number(
            "Price known",
            "Part of the held GPU-hours that had a price. Money of the others is in no sum: it is missing, not 0.",
            (f"sum({priced}) / sum({held})", ""),
            unit="percentunit",
            bad_below=0.99,
            decimals=1,
        ),
        number(
            "Activity known",
            "Part of the held GPU-hours of which it was measured whether they worked.",
            (f"(sum({known}) or vector(0)) / sum({held})", ""),
            unit="percentunit",
            bad_below=0.9,
            decimals=1,
        ),
        number(
            "Per GPU-hour",
            "Money for each GPU-hour that was held and priced, by model. Absent where a model was paid in several "
            "currencies in one cluster.",
            (of_one_currency(priced, RANGE, 3600), "{{model}} {{currency}}"),
            unit=MONEY,
            decimals=2,
            span=6,
        ),
        number(
            "Per kWh",
            "Money of what was held for each kWh that it used, by model. Absent as beside, and where energy was not "
            "measured.",
            (of_one_currency(joules, RANGE, 3_600_000), "{{model}} {{currency}}"),
            unit=MONEY,
            decimals=2,
            span=6,
        ),
    ]


def build() -> dict[str, Any]:
    """The dashboard as JSON values."""
    rows: Rows = (
        ("This month (UTC): follows Cluster", _month()),
        ("Over time: follows Cluster", _over_time()),
        ("Who: each follows Cluster and its own choice", _who()),
        ("Waste: follows Cluster, Namespace, Team, Model", _waste()),
        ("Budgets: all of them", _budgets()),
        ("How far to trust it: follows Cluster", _trust()),
    )
    return board(
        uid="gpu-cost-finops",
        title="GPU FinOps",
        description="What the fleet costs, whose it is, what of it is waste, how far to trust it. Days are UTC, as in "
        "the ledger, in reports and on the cost page.",
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
