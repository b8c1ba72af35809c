"""The cost service's pages as HTML: true figures, harmless names, and a report of missing data."""

import csv
import gzip
import io
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.message import Message
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from fleet_support import FleetServer, backfill, prometheus, truth_between
from service_support import Served, budget_state, in_thread, recommendation, served

from exporter.cli import main
from exporter.config.options import ServiceServingSettings
from exporter.cost.dimensions import Dimension, pairs
from exporter.cost.live import PodDocument
from exporter.cost.report import FleetReport, Question
from exporter.cost.window import parse_window
from exporter.model.formatting import brief_minutes, coverage, decimal, gpus, hours, money, percent
from exporter.model.ledger import ByState, Totals
from exporter.service.settings import ServeSettings
from gpu_simulator.fleet import FleetTruth
from gpu_simulator.fleet_plan import FleetPlan

DAY_SECONDS, HOUR_SECONDS = 86_400, 3600
MONTH = "2026-09"
WEEK = "2026-09-14..2026-09-20"
HOSTILE = "<script>alert(1)</script>"
FORMULA = '=HYPERLINK("http://evil.example","x")'
RIGHT_TO_LEFT = "\u202egnp.exe"


class Page(HTMLParser):
    """The content of a page: its tables by row, its links, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.data: list[str] = []
        self.tags: list[str] = []
        self.sorted: list[str] = []
        self._cell: list[str] | None = None
        self._hidden = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self._cell = []
            if values.get("aria-sort"):
                self.sorted.append(str(values["aria-sort"]))
        if tag == "a":
            self.links.append(str(values.get("href")))
        if tag in {"script", "style"}:
            self._hidden += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in {"td", "th"} and self._cell is not None and self.rows:
            self.rows[-1].append(" ".join("".join(self._cell).split()))
            self._cell = None
        if tag in {"script", "style"}:
            self._hidden -= 1

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        self.data.append(data)
        if self._cell is not None:
            self._cell.append(data)

    @property
    def text(self) -> str:
        """Return all text, with single spaces."""
        return " ".join(" ".join(self.data).split())

    def row(self, name: str) -> list[str]:
        """Return the first row whose first cell begins with a name."""
        return next(row for row in self.rows if row and (row[0] == name or row[0].startswith(f"{name} ")))


@pytest.fixture(scope="module")
def now(small_fleet: FleetPlan) -> float:
    return small_fleet.end_seconds + 1500.0


@pytest.fixture(scope="module")
def service(fleet_prometheus: FleetServer, now: float) -> Iterator[Served]:
    with in_thread(served(fleet_prometheus.url, now)) as running:
        yield running


def fetch(url: str, path: str, **headers: str) -> tuple[int, Message, bytes]:
    """Return status, headers and body."""
    address = quote(f"{url}{path}", safe=":/?&=%+#,().-_~")
    request = urllib.request.Request(address, headers={"Accept": "text/html", **headers})  # noqa: S310 - our own server
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - as above
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def page(running: Served, path: str, status: int = 200) -> Page:
    found, _, body = fetch(running.url, path)
    assert found == status, f"{path}: {body.decode()[:500]}"
    return Page(body.decode())


def report(running: Served, *by: Dimension) -> FleetReport:
    """Return the service's report of the month."""
    window = parse_window(MONTH, running.fleet.freshness().now_seconds)
    return running.ask(running.fleet.report(window, Question(by=by)))


def month_truth(small_fleet: FleetPlan) -> FleetTruth:
    start = small_fleet.end_seconds - small_fleet.end_seconds % DAY_SECONDS - 20 * DAY_SECONDS
    return truth_between(start, small_fleet.end_seconds, small_fleet)


def held(truth: FleetTruth, *names: str, **wanted: str) -> dict[tuple[str, ...], Totals]:
    found = truth.total("kind", *names, **wanted)
    return {key[1:]: totals for key, totals in found.items() if key[0] not in {"Unallocated", "Unattributed"}}


def as_sums(found: dict[tuple[str, ...], Totals], name: str) -> Totals:
    return found[name,]


def test_table_figures_match_the_truth(service: Served, small_fleet: FleetPlan) -> None:
    shown = page(service, f"/by/namespace?window={MONTH}&currency=USD")
    sums: dict[str, Totals] = {}
    truth = month_truth(small_fleet)
    for namespace in {key[0] for key in truth.total("namespace") if key[0]}:
        sums[namespace] = truth.sum(namespace=namespace)
    assert len(sums) > 3
    for namespace, totals in sums.items():
        row = shown.row(namespace)
        usd = totals.money["USD"]
        expected = [
            hours(totals.seconds.total),
            hours(totals.seconds.active),
            hours(totals.seconds.idle),
            hours(totals.seconds.unknown),
            decimal(usd.total) + ("*" if totals.unpriced_seconds else ""),
            decimal(usd.idle),
        ]
        assert row[1:7] == expected, namespace


def test_unallocated_unattributed_and_total_rows_sum_to_the_capacity(service: Served, small_fleet: FleetPlan) -> None:
    shown = page(service, f"/by/namespace?window={MONTH}&currency=USD")
    truth = month_truth(small_fleet)
    assert shown.row("Unallocated")[1] == hours(truth.sum(kind="Unallocated").seconds.total)
    assert shown.row("Unattributed")[1] == hours(truth.sum(kind="Unattributed").seconds.total)
    assert shown.row("Total")[1] == hours(truth.capacity_seconds)
    assert "all of the capacity" in shown.text
    assert "in brackets the part of active time that was profiled" in shown.text


def test_cluster_cost_is_the_same_in_its_table_and_on_its_own_page(service: Served, small_fleet: FleetPlan) -> None:
    place = next(key[0] for key in held(month_truth(small_fleet), "cluster"))
    table = page(service, f"/by/cluster?window={MONTH}&currency=USD")
    shown = page(service, f"/owner?window={MONTH}&currency=USD&cluster={place}")
    cost = float(table.row(place)[5].rstrip("*").replace(",", ""))
    assert f"Held by owners {money(cost, 'USD')}" in shown.text
    assert f"Idle hours {table.row(place)[3]}" in shown.text
    assert "Not held by an owner $" in shown.text


def test_legend_shows_the_cluster_of_equally_named_nodes(service: Served) -> None:
    shown = page(service, f"/by/node?window={MONTH}&currency=USD")
    assert "sim-node-0000 (alpha)" in shown.text
    assert "sim-node-0000 (beta)" in shown.text


def test_unallocated_and_unattributed_rows_have_no_idle_hours(service: Served) -> None:
    shown = page(service, f"/by/namespace?window={MONTH}")
    assert shown.row("Unallocated")[2:5] == ["", "", ""]
    assert shown.row("Unattributed")[2:5] == ["", "", ""]


def test_currencies_are_never_summed_and_each_is_linked(service: Served, small_fleet: FleetPlan) -> None:
    truth = month_truth(small_fleet)
    for currency, other in (("USD", "EUR"), ("EUR", "USD")):
        shown = page(service, f"/by/model?window={MONTH}&currency={currency}")
        total = truth.sum().money[currency].total
        assert shown.row("Total")[5].rstrip("*") == decimal(total)
        assert any(f"currency={other}" in link for link in shown.links)


def test_default_currency_is_that_of_most_gpu_hours_on_every_page(service: Served) -> None:
    for path in ("/", "/by/team", "/by/model", "/by/node", "/owner?team=vision", "/owner?team=vision&columns=funnel"):
        shown = page(service, path)
        assert "Cost USD" in shown.text, path


def test_overview_shows_cost_hours_coverage_and_forecast(service: Served, small_fleet: FleetPlan) -> None:
    shown = page(service, f"/?window={MONTH}&currency=USD")
    truth = month_truth(small_fleet)
    total = truth.sum()
    assert f"Cost in this period {money(total.money['USD'].total, 'USD')}" in shown.text
    owners = [totals for key, totals in truth.total("kind").items() if key[0] not in {"Unallocated", "Unattributed"}]
    idle = sum(totals.money["USD"].idle for totals in owners)
    assert f"Held, but idle {money(idle, 'USD')}" in shown.text
    allocated = sum(totals.seconds.total for totals in owners)
    unknown = sum(totals.seconds.unknown for totals in owners)
    assert f"Coverage {coverage(1 - unknown / allocated)}" in shown.text
    assert f"Spent this month {money(total.money['USD'].total, 'USD')}" in shown.text
    assert "Forecast of the month" in shown.text


def test_the_funnel_counts_gpus_and_their_cost(service: Served, small_fleet: FleetPlan) -> None:
    shown = page(service, f"/?window={MONTH}&currency=USD")
    truth = month_truth(small_fleet)
    recorded = sum(sum(clusters.values()) for clusters in truth.recorded_hours.values()) / len(small_fleet.clusters)
    owners = [totals for key, totals in truth.total("kind").items() if key[0] not in {"Unallocated", "Unattributed"}]
    assert shown.row("Total")[1] == gpus(truth.capacity_seconds / recorded / HOUR_SECONDS)
    seconds = sum((totals.seconds for totals in owners), ByState())
    paid = sum((totals.money["USD"] for totals in owners), ByState())
    for step, name in (("Allocated", "total"), ("Active", "active"), ("Effective", "effective")):
        row = shown.row(step)
        assert row[1] == gpus(getattr(seconds, name) / recorded / HOUR_SECONDS)
        assert row[3] == money(getattr(paid, name), "USD")
    counts = [float(shown.row(step)[1]) for step in ("Total", "Allocated", "Active", "Effective")]
    assert counts == sorted(counts, reverse=True)
    assert f"{coverage(seconds.profiled / seconds.active)} of active was profiled" in shown.text


def test_team_has_its_own_funnel_and_unprofiled_is_not_zero(service: Served, small_fleet: FleetPlan) -> None:
    shown = page(service, f"/owner?team=vision&window={MONTH}&currency=USD")
    assert not [row for row in shown.rows if row and row[0].startswith("Total there and metered")]
    assert shown.row("Effective")[3] == money(month_truth(small_fleet).sum(team="vision").money["USD"].effective, "USD")
    unprofiled = page(service, f"/owner?model=Tesla+T4&window={MONTH}&currency=USD")
    assert unprofiled.row("Effective")[1:4] == ["—not profiled", "", ""]
    assert unprofiled.row("Active")[1] > "0"


def test_chart_matches_its_table_and_sums_to_the_total(service: Served, small_fleet: FleetPlan) -> None:
    text = fetch(service.url, f"/?window={MONTH}&currency=USD")[2].decode()
    days = [row for row in Page(text).rows if row and re.fullmatch(r"2026-09-\d\d", row[0])]
    assert [row[0] for row in days] == [f"2026-09-{number:02}" for number in range(1, 22)]
    sums = [float(row[-1].replace(",", "")) for row in days]
    assert sum(sums) == pytest.approx(month_truth(small_fleet).sum().money["USD"].total, abs=0.005 * len(days))
    heights: dict[str, float] = {}
    for place, height in re.findall(r'<rect x="([\d.]+)%" y="[\d.]+" width="[\d.]+%" height="([\d.]+)"/>', text):
        heights[place] = heights.get(place, 0.0) + float(height)
    assert list(heights.values()) == pytest.approx(
        [total / sums[0] * next(iter(heights.values())) for total in sums], rel=0.01
    )
    assert "Total USD" in Page(text).text


def test_every_format_of_a_report_has_the_same_figures(
    service: Served, fleet_prometheus: FleetServer, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["report", "--prometheus", fleet_prometheus.url, "--window", WEEK, "--by", "team"]
    forms = {}
    for form, options in (("json", ()), ("table", ()), ("funnel", ()), ("csv", ("--with-notes",)), ("html", ())):
        assert main([*command, "--format", form, *options]) == 0
        forms[form] = capsys.readouterr().out
    document = json.loads(forms["json"])
    (titles, table), (steps, funnel) = (table_of(forms[form]) for form in ("table", "funnel"))
    rows = {(row["team"] or row["record"]).strip(): row for row in csv.DictReader(io.StringIO(forms["csv"]))}
    html = Page(forms["html"])
    web, web_funnel = (
        Page(fetch(service.url, f"/by/team?window={WEEK}&currency=USD{more}")[2].decode())
        for more in ("", "&columns=funnel")
    )
    columns, web_steps, html_titles = (columns_of(one, "Team") for one in (web, web_funnel, html))
    lines = [(line["team"] or line["owner_kind"] or "(no team)", line) for line in document["lines"]]
    assert len(lines) > 4
    for name, line in [*lines, ("Total", document["total"])]:
        paid = {one["currency"]: one for one in line["money"]}
        seconds = [line[f"{state}_seconds"] for state in ("allocated", "active", "idle", "unknown")]
        assert table[name][1:5] == ["" if one is None else decimal(one / 3600, 1) for one in seconds], name
        assert html.row(name)[1:5] == table[name][1:5], name
        csv_row = rows[name if name != "(no team)" else "Owner"]
        csv_hours = [csv_row[f"{state}_hours"] for state in ("gpu", "active", "idle", "unknown")]
        assert csv_hours == ["" if one is None else str(round(one / 3600, 3)) for one in seconds], name
        shown = dict(zip(columns, web.row(name), strict=True))
        states = [shown[title] for title in ("GPU-hours", "Active", "Idle", "Unknown")]
        assert states == ["" if one is None else hours(one) for one in seconds], name
        step, web_step = (
            dict(zip(steps, funnel[name], strict=True)),
            dict(zip(web_steps, web_funnel.row(name), strict=True)),
        )
        for state in ("active", "effective"):
            one = line[f"{state}_seconds"]
            assert step[state.capitalize()] == ("" if one is None else decimal(one / 3600, 1)), name
            assert web_step[state.capitalize()] == ("" if one is None else hours(one)), name
        if "USD" not in paid:
            continue
        page_of = dict(zip(html_titles, html.row(name), strict=True))
        for state in ("active", "effective"):
            one = paid["USD"][f"{state}_cost"]
            words = "" if one is None else decimal(one)
            title = f"{state.capitalize()} USD"
            assert (step[title], web_step[title], page_of[title]) == (words, words, words), name
            assert csv_row[f"{state}_cost_USD"] == ("" if one is None else str(round(one, 2))), name
        star = "*" if line["unpriced_seconds"] else ""
        cost, idle = paid["USD"]["cost"], paid["USD"]["idle_cost"]
        money_of = dict(zip(titles, table[name], strict=True))
        idle_words = "" if idle is None else decimal(idle)
        assert [money_of["Cost USD"], money_of["Idle USD"]] == [decimal(cost) + star, idle_words], name
        assert [shown["Cost USD"], shown["Idle USD"]] == [decimal(cost) + star, idle_words], name
        assert csv_row["cost_USD"] == str(round(cost, 2)), name
        assert csv_row["idle_cost_USD"] == ("" if idle is None else str(round(idle, 2))), name
        assert shown["Change USD"] == money_of["Change USD"], name
        before = line.get("before", document["before"]["money"])
        change = cost - sum(one["cost"] for one in before if one["currency"] == "USD")
        assert shown["Change USD"] == f"{change:+,.2f}", name
        assert csv_row["change_USD"] == str(round(change, 2)), name
    owned = sum(line["idle_seconds"] for line in document["lines"] if line["held"])
    assert document["total"]["idle_seconds"] == pytest.approx(owned, rel=1e-12)
    assert (
        f"Idle {decimal(sum(one['idle_cost'] for one in document['total']['money'] if one['currency'] == 'USD'))} ("
        in html.text
    )


def columns_of(page: Page, first: str) -> list[str]:
    """Return the headings of the table that begins with ``first``."""
    return [column.rstrip("▼▲") for column in next(row for row in page.rows if row and row[0].rstrip("▼▲") == first)]


def table_of(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the headings of a table by team, and its cells by name."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Team "))
    body = (cells_below(lines[start], line) for line in lines[start + 2 : start + 20])
    return re.split(r"\s{2,}", lines[start]), {cells[0]: cells for cells in body}


def cells_below(head: str, line: str) -> list[str]:
    """Return the cells of a line of the table: the name on the left, each figure up to the end of its heading."""
    ends = [found.end() for found in re.finditer(r"\S+(?: \S+)*", head)]
    figures = head.index("GPU-hours")
    starts = [figures - 2, *ends[1:-1]]
    return [line[:figures].strip(), *(line[start:end].strip() for start, end in zip(starts, ends[1:], strict=True))]


def test_gpus_without_an_owner_are_columns_of_their_node(service: Served, small_fleet: FleetPlan) -> None:
    shown = page(service, f"/by/node?window={MONTH}&currency=USD")
    columns = columns_of(shown, "Node")
    place = columns.index("Unallocated USD")
    names = [row[0] for row in shown.rows if row and row[0].startswith("Unallocated")]
    assert len(names) == 1, "one row for all nodes"
    nodes = [row for row in shown.rows if len(row) == len(columns) and row[0].startswith("sim-node")]
    assert len(nodes) == len({row[0] for row in nodes}), "equal names have the cluster"
    free = sum(float(row[place].replace(",", "")) for row in nodes if row[place])
    truth = month_truth(small_fleet).sum(kind="Unallocated").money["USD"].total
    assert free == pytest.approx(truth, abs=0.005 * len(nodes))
    assert shown.row("Total")[place] == decimal(truth)


def test_an_amount_is_explained_by_hours_rate_and_price_row(service: Served) -> None:
    shown = page(service, f"/owner?window={MONTH}&namespace=vision&currency=USD")
    columns = next(row for row in shown.rows if row and row[0] == "Model")
    (row,) = [row for row in shown.rows if row and row[0].startswith("H100") and "on-demand" in row[0]][:1]
    cells = dict(zip(columns, row, strict=True))
    cost, rate = (float(cells[name].rstrip("*").replace(",", "")) for name in ("Cost USD", "USD/h"))
    assert cells["Price row"].startswith("simulated:fleet at ")
    assert f"GPU-hours with a price \N{MULTIPLICATION SIGN} {cells['USD/h']} = {decimal(cost)} USD" in shown.text
    assert rate * float(cells["GPU-hours"].replace(",", "")) == pytest.approx(cost, rel=0.01)


def test_models_without_a_price_are_listed_with_a_row_to_paste(service: Served, tmp_path: Path) -> None:
    text = fetch(service.url, "/by/team?window=2026-08-20..2026-09-10")[2].decode()
    pasted = [
        unescape(one) for one in re.findall(r'<pre [^>]*aria-label="Row of a price book">(.*?)</pre>', text, re.DOTALL)
    ]
    assert pasted
    book = tmp_path / "book.yaml"
    book.write_text("currency: USD\nrows:\n" + "\n".join(pasted).replace("PRICE", "2.5") + "\n", encoding="utf-8")
    assert main(["prices", "check", str(book)]) == 0
    assert "not included in the cost" in Page(text).text


def test_two_dates_form_a_period_including_both_days(service: Served) -> None:
    shown = page(service, "/by/team?from=2026-09-10&to=2026-09-12&window=30d")
    assert "2026-09-10 to 2026-09-12 UTC" in shown.text
    assert any("window=2026-09-10..2026-09-12" in link for link in shown.links)
    assert "one of the two dates is missing" in page(service, "/by/team?from=2026-09-10", 400).text


def test_api_has_an_html_page(service: Served) -> None:
    shown = page(service, "/api")
    assert "GET /api/v1/report" in shown.text
    assert "Allowed: none, even, weighted. Default: none." in shown.text
    assert any(link.endswith("/api") for link in page(service, "/").links)
    for link in shown.links:
        if link.startswith(("/api/", "/allocation")):
            assert fetch(service.url, link)[0] == 200, link


def test_most_waste_is_the_owner_with_the_highest_idle_cost(service: Served, small_fleet: FleetPlan) -> None:
    shown = page(service, f"/?window={MONTH}&currency=USD")
    owners = held(month_truth(small_fleet), "namespace", "workload")
    idle = {key: totals.money["USD"].idle for key, totals in owners.items() if "USD" in totals.money}
    worst = max(idle, key=lambda key: idle[key])
    waste = shown.text[shown.text.index("Most waste") :]
    assert waste.index(worst[1]) < waste.index(money(sorted(idle.values())[-2], "USD"))


def test_labels_have_pages_and_filters(service: Served, small_fleet: FleetPlan) -> None:
    truth = month_truth(small_fleet)
    seconds: dict[str, float] = {}
    for (labels, kind), totals in truth.total("labels", "kind").items():
        if kind not in {"Unallocated", "Unattributed"}:
            project = pairs(labels).get("project", "(no project)")
            seconds[project] = seconds.get(project, 0.0) + totals.seconds.total
    shown = page(service, f"/by/label:project?window={MONTH}&currency=USD")
    assert {name: shown.row(name)[1] for name in seconds} == {name: hours(value) for name, value in seconds.items()}
    assert {f"/by/label:{key}" for key in ("environment", "project")} <= {urlsplit(link).path for link in shown.links}
    assert any("by=label%3Aproject" in link for link in shown.links if link.startswith("/api/v1/report"))
    (link,) = {link for link in shown.links if link.startswith("/owner?") and link.endswith("label:project=sweep")}
    assert hours(seconds["sweep"]) in page(service, link).text
    some = page(service, f"/by/team?window={MONTH}&label:project=sweep&label:environment=dev")
    assert some.row("Total")[1] == hours(truth.sum(labels="environment=dev,project=sweep").seconds.total)
    text = fetch(service.url, f"/?window={MONTH}")[2].decode()
    assert '<option value="sweep">' in text
    assert "no line has the label unknown" in page(service, f"/by/label:unknown?window={MONTH}").text
    page(service, "/by/label:a%20b", 404)


def test_filters_are_in_the_url_and_apply_to_every_figure(service: Served, small_fleet: FleetPlan) -> None:
    shown = page(service, f"/by/workload?window={MONTH}&team=vision&cluster=alpha&currency=USD")
    expected = month_truth(small_fleet).sum(team="vision", cluster="alpha")
    assert shown.row("Total")[1] == hours(expected.seconds.total)
    kept = [link for link in shown.links if link.startswith("/by/model")]
    assert parse_qs(urlsplit(kept[0]).query) == {
        "window": [MONTH],
        "team": ["vision"],
        "cluster": ["alpha"],
        "currency": ["USD"],
    }


def test_downloads_have_the_filters_of_the_page(service: Served) -> None:
    shown = page(service, f"/by/namespace?window={MONTH}&team=vision&share=weighted")
    asked = {
        parse_qs(urlsplit(link).query)["format"][0]: parse_qs(urlsplit(link).query)
        for link in shown.links
        if link.startswith("/api/v1/report")
    }
    assert set(asked) == {"csv", "json", "html"}, "FOCUS cannot have a single team: its split charges sum to the whole"
    assert asked["csv"] == {
        "window": [MONTH],
        "by": ["namespace"],
        "filter.team": ["vision"],
        "shareIdle": ["weighted"],
        "format": ["csv"],
    }
    whole = page(service, f"/by/namespace?window={MONTH}&cluster=alpha")
    assert any("format=focus" in link and "filter.cluster=alpha" in link for link in whole.links)


def test_charged_amount_is_the_cost_plus_the_shared_cost(service: Served) -> None:
    text = fetch(service.url, f"/by/team?window={MONTH}&cluster=alpha&currency=USD&share=weighted")[2].decode()
    rows = re.findall(
        r'data-label="Cost USD">([\d,.]+)\*?</td>.*?data-label="Shared USD">\+([\d,.]+)</td>\s*'
        r'<td class="num" data-label="Charged USD">([\d,.]+)',
        text,
        re.DOTALL,
    )
    assert len(rows) > 2
    for cost, shared, charged in rows:
        parts = (float(one.replace(",", "")) for one in (cost, shared))
        assert float(charged.replace(",", "")) == pytest.approx(sum(parts), abs=1.01)
    assert "Charged" not in fetch(service.url, f"/by/team?window={MONTH}&currency=USD")[2].decode()


def test_owner_pages_link_from_namespace_to_workload(service: Served, small_fleet: FleetPlan) -> None:
    table = page(service, f"/by/namespace?window={MONTH}")
    namespace = next(link for link in table.links if link.startswith("/owner") and "namespace=vision" in link)
    inside = page(service, namespace)
    assert inside.row("Total")[1] == hours(month_truth(small_fleet).sum(namespace="vision").seconds.total)
    workload = next(link for link in inside.links if "workload=" in link and "kind=" in link)
    wanted = {name: values[0] for name, values in parse_qs(urlsplit(workload).query).items()}
    own = page(service, workload)
    expected = month_truth(small_fleet).sum(
        cluster=wanted["cluster"], namespace="vision", kind=wanted["kind"], workload=wanted["workload"]
    )
    assert f"GPU-hours {hours(expected.seconds.total)}" in own.text
    assert wanted["workload"] in own.text


def test_shared_cost_is_a_separate_column_that_sums_to_zero(service: Served) -> None:
    shown = page(service, f"/by/team?window={MONTH}&share=even&shareUnallocated=true&currency=USD")
    header = next(row for row in shown.rows if row and row[0] == "Team")
    column = header.index("Shared USD")
    signed = [row[column] for row in shown.rows if len(row) == len(header) and row[column][:1] in {"+", "-"}]
    shared = [float(text.replace(",", "")) for text in signed]
    assert len(shared) > 4
    assert sum(shared) == pytest.approx(0, abs=0.005)


@pytest.mark.parametrize(
    ("sort", "column", "backwards"),
    [("-cost", 5, True), ("hours", 1, False), ("-idle", 3, True), ("-unknown", 4, True), ("-effective", 7, True)],
)
def test_table_is_sorted_by_its_header_links(service: Served, sort: str, column: int, *, backwards: bool) -> None:
    shown = page(service, f"/by/team?window={MONTH}&sort={sort}&currency=USD")
    rows = [row for row in shown.rows if len(row) == 10][1:]
    ends = next(number for number, row in enumerate(rows) if row[0].startswith("All owners"))
    values = [
        float(row[column].partition(" %")[0].rstrip("*").replace(",", "").replace("<", "")) for row in rows[:ends]
    ]
    assert values == sorted(values, reverse=backwards)
    assert shown.sorted == ["descending" if backwards else "ascending"]


def test_workloads_are_paged_by_one_hundred_and_all_are_listed(service: Served) -> None:
    seen: list[str] = []
    path: str | None = f"/by/workload?window={MONTH}"
    while path:
        shown = page(service, path.partition("#")[0])
        links = [link for link in shown.links if link.startswith("/owner") and "workload=" in link]
        assert len(links) <= 100
        seen += links
        number = parse_qs(urlsplit(path).query).get("page", ["1"])[0]
        following = [link for link in shown.links if f"page={int(number) + 1}" in link]
        path = following[0] if following else None
    lines = report(service, "cluster", "namespace", "kind", "workload", "team").held
    named = [line for line in lines if line.key.workload]
    assert len(seen) == len(set(seen)) == len(named) > 200


def test_search_matches_names_kinds_and_teams(service: Served) -> None:
    shown = page(service, f"/by/workload?window={MONTH}&q=NOTEBOOK+vision")
    names = [link for link in shown.links if link.startswith("/owner") and "workload=" in link]
    assert names
    assert all("otebook" in link and "vision" in link for link in names)
    nothing = page(service, f"/by/workload?window={MONTH}&q=no-such-name")
    assert "No name has “no-such-name” in it." in nothing.text


def test_unknown_team_is_reported_with_similar_names(service: Served) -> None:
    shown = page(service, "/by/team?team=visoin")
    assert "Team visoin had no GPU in this period; there is: vision" in shown.text
    assert "Nothing was recorded here." in shown.text
    assert "nothing matches" not in shown.text, "the page has one message"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("window=never", "'never' is not a period"),
        ("window=2030-01", "lies in the future"),
        ("page=x", "page: value 'x' is not known; allowed: a whole number from 0"),
        ("columns=all", "columns: value 'all' is not known; allowed: states, funnel"),
        ("share=all", "share: value 'all' is not known; allowed: none, even, weighted"),
    ],
)
def test_invalid_parameter_is_reported_with_the_allowed_values(service: Served, query: str, said: str) -> None:
    shown = page(service, f"/by/team?{query}", 400)
    assert said in shown.text
    assert "This address is not understood" in shown.text


def test_a_window_before_all_data_shows_an_empty_page(service: Served) -> None:
    for path in ("/", "/by/team", "/by/workload", "/owner?team=vision", "/recommendations", "/budgets", "/about"):
        shown = page(service, f"{path}{'&' if '?' in path else '?'}window=2020-01")
        assert "0 of 1,488" in shown.text or "0 of 744" in shown.text, path


def test_simulated_data_is_marked_on_every_page(service: Served) -> None:
    for path in ("/", "/by/node", "/owner?namespace=vision", "/recommendations", "/budgets", "/about", "/api"):
        assert "SIMULATED" in (page(service, path)).text, path


def test_coverage_and_priced_ratio_are_shown_on_every_page(service: Served) -> None:
    for path in ("/", "/by/pool", "/owner?namespace=vision", "/recommendations", "/budgets", "/about"):
        text = (page(service, path)).text
        assert re.search(r"Coverage \d+(\.\d)? %", text), path
        assert re.search(r"Priced \d+(\.\d)? %", text), path
        assert "Newest hour 2026-09-21 14:00 UTC" in text, path


def test_unpriced_hours_are_shown_and_not_in_the_cost(service: Served) -> None:
    shown = page(service, f"/by/model?window={MONTH}")
    unpriced = report(service, "model").total.unpriced_seconds
    assert (f"{hours(unpriced)} GPU-hours have no price and are not included" in shown.text) == (unpriced > 0)


def test_failed_page_shows_the_reason_and_a_retry_time(now: float) -> None:
    with in_thread(served("http://127.0.0.1:9", now, problem="Prometheus does not answer since 14:00")) as running:
        shown = page(running, "/", 503)
        assert fetch(running.url, "/by/team")[1]["Retry-After"]
    assert "This cannot be shown now" in shown.text
    assert "Prometheus does not answer since 14:00" in shown.text
    assert "127.0.0.1:9" in shown.text


def test_unknown_page_returns_404_with_a_link_home(service: Served) -> None:
    shown = page(service, "/by/planet", 404)
    assert "There is no such page" in shown.text
    assert "/" in shown.links


def test_pods_and_devices_of_a_workload_are_shown_with_unknown_values(
    fleet_prometheus: FleetServer, now: float
) -> None:
    unknown = PodDocument(
        pod="serving-1-b",
        cluster="alpha",
        node="node-1",
        gpu_uuid="GPU-1",
        gpu_index="3",
        model="NVIDIA H100 80GB HBM3",
        namespace="vision",
        gpu_share_ratio=1.0,
        activity_ratio=None,
        idle_for_seconds=None,
        age_seconds=3 * 86_400.0,
        memory_used_bytes=3 * 1024.0**3,
        live=False,
    )
    price = [{"currency": "USD", "cost": 6.16}]
    idle = replace(
        unknown, pod="serving-1-a", activity_ratio=0.02, idle_for_seconds=7300.0, cost_per_hour=price, live=True
    )
    with in_thread(served(fleet_prometheus.url, now, pods=[idle, unknown, replace(idle, namespace="new")])) as running:
        shown = page(running, "/owner?namespace=vision")
        new = page(running, "/owner?namespace=new")
    assert "Nothing was recorded here. A new workload is here after its first full hour." in new.text
    assert new.row("serving-1-a") == shown.row("serving-1-a")
    assert shown.row("serving-1-a")[2:] == ["100 %", "2 %", "2 h", "3 d", "3.0 GiB", "$6.16"]
    ended = shown.row("serving-1-b")
    assert "ended" in ended[0]
    assert ended[3] == ended[4] == "—unknown"
    assert ended[7] == "—no price"


def test_unavailable_pods_do_not_affect_the_rest_of_the_page(fleet_prometheus: FleetServer, now: float) -> None:
    with in_thread(served(fleet_prometheus.url, now, pods=None)) as running:
        shown = page(running, "/owner?namespace=vision")
    assert "no answer; see whether Prometheus runs" in shown.text
    assert "Cost in this period" in shown.text


def test_recommendations_show_saving_evidence_and_risk_and_are_filtered(
    fleet_prometheus: FleetServer, now: float
) -> None:
    many = [
        recommendation("vision", "serving-1", nodes=("sim-node-0000", "sim-node-0001")),
        recommendation("ads", "trainer", per_month=None, team="ads", title="Share one GPU"),
        recommendation("ads", "batch", per_month=100.0, currency="EUR", team="ads"),
    ]
    with in_thread(served(fleet_prometheus.url, now, recommendations=many)) as running:
        shown = page(running, "/recommendations")
        ads = page(running, "/recommendations?team=ads")
        node = page(running, "/owner?node=sim-node-0000")
    assert "All of them together $8,432 a month" in shown.text
    assert "All of them together €100.00 a month" in shown.text
    assert "Share one GPU" in shown.text
    assert "no price" in shown.text
    assert "3 of its 8 GPUs were idle in all of 612 measured hours." in shown.text
    assert "A load that comes once a month would not fit" in shown.text
    assert "Last day" not in shown.text, "the recommendations cover the last 7 days"
    assert "Last day" in node.text
    assert "ask team search" in shown.text
    assert "kubectl -n vision edit deployment/serving-1" in shown.text
    assert "vision/serving-1" not in ads.text
    assert "ads/trainer" in ads.text
    assert "vision/serving-1" in node.text
    assert "ads/trainer" not in node.text


def test_budgets_show_their_status_in_words(fleet_prometheus: FleetServer, now: float) -> None:
    states = [
        budget_state("vision", 100.0, 120.0, 150.0, now),
        budget_state("ads", 100.0, 40.0, 130.0, now),
        budget_state("search", 100.0, 10.0, 60.0, now),
        budget_state("speech", 100.0, 1.0, None, now),
    ]
    states[3] = replace(states[3], unpriced_seconds=7200.0)
    states.append(replace(budget_state("core", 100.0, 3.0, None, now), known=False, notes=("2 days were not read",)))
    with in_thread(served(fleet_prometheus.url, now, budgets=states)) as running:
        text = (page(running, "/budgets")).text
    assert "—unknown of $100.00 not known no projection yet" in text.replace("— unknown", "—unknown")
    assert "Note 2 days were not read" in text
    for said in ("spent $150.00 projected", "will be overspent $130.00", "on course $60.00", "too early to tell"):
        assert said in text
    assert "2.00 GPU-hours without a price are not in it" in text


def test_prefix_is_part_of_every_link(fleet_prometheus: FleetServer, now: float) -> None:
    settings = ServeSettings(
        serving=ServiceServingSettings(external_url="https://cost.example/gpu", title="Cost of Example")
    )
    with in_thread(served(fleet_prometheus.url, now, settings=settings)) as running:
        shown = page(running, "/gpu/by/team")
        found = [link for link in shown.links if link != "#content"]
        assert found
        assert all(link.startswith("/gpu/") for link in found)
        page(running, found[0])
    assert "Cost of Example" in shown.text


def test_static_files_are_compressed_cached_and_the_only_allowed_scripts(service: Served) -> None:
    gzipped = {"Accept-Encoding": "gzip"}
    _, headers, body = fetch(service.url, "/", **gzipped)
    policy, text = headers["Content-Security-Policy"], gzip.decompress(body).decode()
    sources = re.findall(r'(?:src|href)="(/static/[^"]+)"', text)
    assert len(sources) == 2
    for source in sources:
        _, headers, body = fetch(service.url, source, **gzipped)
        assert headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert headers["Content-Encoding"] == "gzip"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert gzip.decompress(body) == fetch(service.url, source)[2]
    assert fetch(service.url, "/static/page.000000000000.css")[0] == 404
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*(?:src=|application/json))", text)
    assert not re.search(r"\sstyle=|\son\w+=", text)


def hostile_series(end_seconds: int) -> Iterator[str]:
    """Return an hour of a fleet with names that attack the pages."""

    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    names = (HOSTILE, FORMULA, RIGHT_TO_LEFT, 'quote"quote\nline', "</script><b>", "'--")

    def owner(name: str) -> str:
        text = quoted(name)
        return f'workload_namespace="{text}",workload_kind="Job",workload_name="{text}",team="{text}"'

    model = 'model="NVIDIA <b>H100</b>"'
    for level, where in (("workload", model), ("owner", f'{model},node="n1",mode="exclusive"')):
        yield f"# TYPE {level}:gpu_ledger:delta1h gauge"
        for quantity, states, more in (
            ("seconds", {"active_unprofiled": 1800, "idle": 1800}, ""),
            ("cost", {"idle": 2}, ',currency="USD"'),
        ):
            for name in names:
                for state, value in states.items():
                    inside = f'{where},{owner(name)},quantity="{quantity}",state="{state}"{more}'
                    yield f"{level}:gpu_ledger:delta1h{{{inside}}} {value} {end_seconds}"
    yield "# TYPE cluster:gpu_capacity_seconds:delta1h gauge"
    yield f"cluster:gpu_capacity_seconds:delta1h {3600 * len(names)} {end_seconds}"
    yield "# EOF"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, small_fleet: FleetPlan) -> Iterator[FleetServer]:
    directory = tmp_path_factory.mktemp("hostile")
    text = directory / "hostile.om"
    text.write_text("\n".join(hostile_series(small_fleet.end_seconds)) + "\n", encoding="utf-8")
    backfill(text, directory / "blocks")
    with prometheus(directory, directory / "blocks", small_fleet) as server:
        yield server


def test_hostile_names_are_shown_literally(hostile: FleetServer, now: float) -> None:
    paths = ("/", "/by/team", "/by/workload", "/by/namespace", "/by/model", "/by/node", f"/by/workload?q={HOSTILE}")
    advice = [recommendation(HOSTILE, HOSTILE, title=HOSTILE, evidence=(HOSTILE,), risk=FORMULA, team=HOSTILE)]
    with in_thread(served(hostile.url, now, recommendations=advice, problem=HOSTILE)) as running:
        for path in (*paths, "/recommendations", "/owner?team=%3Cscript%3Ealert(1)%3C/script%3E"):
            status, _, body = fetch(running.url, path)
            assert status == 200, path
            text = body.decode()
            assert HOSTILE not in text, path
            assert "<b>H100" not in text, path
            assert "</script><b>" not in text, path
            assert HOSTILE in unescape(text), path
        table = page(running, "/by/team?window=7d")
    assert RIGHT_TO_LEFT in table.text
    assert "Coverage 100 %" in table.text


def test_hostile_names_link_to_their_own_page(hostile: FleetServer, now: float) -> None:
    with in_thread(served(hostile.url, now)) as running:
        table = page(running, "/by/workload?window=7d")
        links = [link for link in table.links if link.startswith("/owner")]
        assert len(links) == 6
        for link in links:
            own = page(running, link)
            assert "GPU-hours 1.00" in own.text, link


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (lambda: money(0.0, "USD"), "$0.00"),
        (lambda: money(0.004, "USD"), "<$0.01"),
        (lambda: money(999.994, "CHF"), "CHF 999.99"),
        (lambda: money(1234.5, "EUR"), "€1,234"),
        (lambda: percent(0.004), "<1 %"),
        (lambda: percent(0.999), "99 %"),
        (lambda: percent(1.0), "100 %"),
        (lambda: coverage(0.99999), "99.9 %"),
        (lambda: coverage(1.0), "100 %"),
        (lambda: hours(10.0), "<0.01"),
        (lambda: hours(3600.0 * 1234), "1,234"),
        (lambda: brief_minutes(119.0), "1 min"),
        (lambda: brief_minutes(86_400.0 * 3), "3 d"),
        (lambda: gpus(0.01), "<0.1"),
    ],
)
def test_numbers_are_never_rounded_to_zero_or_to_all(words: Callable[[], str], shown: str) -> None:
    assert words() == shown


def test_month_is_offered_once_it_has_an_hour(fleet_prometheus: FleetServer) -> None:
    first_of_september = 1_788_220_800.0
    for now, offered in ((first_of_september + 1500, False), (first_of_september + 3600 + 1500, True)):
        with in_thread(served(fleet_prometheus.url, now)) as running:
            shown = page(running, "/about")
        assert any("window=2026-09" in link for link in shown.links) == offered
        assert any("window=2026-08" in link for link in shown.links)
