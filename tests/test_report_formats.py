"""A fleet's report in every form: the same figures, its coverage in the footer, and harmless names."""

import csv
import io
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fleet_support import (
    HOSTILE,
    MARKUP,
    TURNED,
    hours,
    ledger,
    ledgers,
    nobody,
    owner,
    small_ledger,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.cost.dimensions import EVERYTHING, UNALLOCATED, Dimension, Filters
from exporter.cost.document import document
from exporter.cost.ledger import FleetLedger
from exporter.cost.render import FLEET_FORMATS, Form, write_fleet
from exporter.cost.report import FleetReport, Question, ShareIdle, compared, make_report

GOLDEN = Path(__file__).parent / "golden"


def report_of(
    known: FleetLedger, *by: Dimension, share_idle: ShareIdle = "none", filters: Filters = EVERYTHING
) -> FleetReport:
    return make_report(known, Question(by=by or ("namespace",), filters=filters, share_idle=share_idle))


def written(report: FleetReport, form: Form, top: int | None = None, *, with_notes: bool = True) -> str:
    stream = io.StringIO(newline="")
    write_fleet(report, form, stream, top=top, with_notes=with_notes)
    text = stream.getvalue()
    assert text.endswith("\n")
    return text


def records(report: FleetReport) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(written(report, "csv"), newline="")))


@pytest.mark.parametrize(("form", "suffix"), [("table", "txt"), ("csv", "csv"), ("json", "json"), ("html", "html")])
def test_every_format_matches_its_golden_file(form: Form, suffix: str) -> None:
    report = report_of(small_ledger(), "workload", "team", "model", share_idle="weighted")
    text = written(report, form)
    path = GOLDEN / f"fleet_report.{suffix}"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8", newline="")
    assert text == path.read_bytes().decode(), "after an intended change: UPDATE_GOLDEN=1 pytest -k golden"


@pytest.mark.parametrize("form", FLEET_FORMATS)
def test_conservation_coverage_and_failed_reads_are_shown_in_every_format(form: Form) -> None:
    short = ledger(
        {owner("a", "x"): hours(active=6, unknown=2, usd=4), nobody(UNALLOCATED): hours(idle=12, unpriced=12)},
        capacity={"": 25 * 3600.0},
    )
    text = written(report_of(short), form)
    assert "25.0" in text or "90000.0" in text, "capacity"
    assert "5.000 GPU-hours have no line" in text or "18000.0" in text or ",5.0," in text, "missing"
    assert "75.00 %" in text or "0.75" in text, "coverage of activity"
    assert "40.00 %" in text or "0.4" in text, "coverage of prices"
    failed = written(report_of(small_ledger()), form)
    assert "HTTP 503 after 4 retries; give --prometheus-timeout more time" in failed


@pytest.mark.parametrize("form", FLEET_FORMATS)
def test_simulated_fleet_is_marked_in_every_format(form: Form) -> None:
    real = ledger({owner("a", "x"): hours(active=6)})
    report = report_of(real)
    assert "simulated" not in written(report, form).lower().replace('"simulated": false', "").replace(".simulated", "")
    fake = make_report(
        FleetLedger(window=real.window, dimensions=real.dimensions, chunks=real.chunks, simulated=True),
        Question(by=("team",)),
    )
    assert "simulated" in written(fake, form).lower()


def test_eight_gpus_at_90_percent_show_90_percent() -> None:
    report = report_of(small_ledger(), "workload", filters=Filters(wanted={"workload": frozenset({"resnet"})}))
    (row,) = [line for line in written(report, "table").splitlines() if line.startswith("vision/Job/resnet")]
    assert row.split()[5:7] == ["90", "%"]
    assert float(records(report)[0]["active_ratio"]) == pytest.approx(0.9)
    assert document(report)["lines"][0]["active_ratio"] == pytest.approx(0.9)
    assert '<td class="n">90 %</td>' in written(report, "html")


def test_low_activity_is_not_shown_as_zero() -> None:
    report = report_of(ledger({owner("a", "x"): hours(active=0.01, idle=20)}))
    assert "<1 %" in written(report, "table")


def test_filtered_report_shows_its_filter_instead_of_missing_hours() -> None:
    report = report_of(small_ledger(), filters=Filters(wanted={"team": frozenset({"core"})}))
    assert "of 508.00 GPU-hours metered: only team core" in written(report, "table")
    assert document(report)["trust"]["missing_seconds"] is None
    rows = {row["record"]: row for row in records(report)}
    assert "Missing" not in rows
    assert rows["Total"]["remark"] == "a part of the capacity: only team core"


def test_names_are_never_spreadsheet_formulas() -> None:
    lines = {owner(name, "x"): hours(active=1) for name in ("=1+1", "+1", "-1", "@x", "\tx", "\r=x", "fine")}
    namespaces = {row["owner_namespace"] for row in records(report_of(ledger(lines))) if row["record"] == "Owner"}
    assert namespaces == {"'=1+1", "'+1", "'-1", "'@x", "'\tx", "'\n'=x", "fine"}


def test_names_survive_quotes_and_newlines_in_csv_and_json() -> None:
    report = report_of(small_ledger(), "workload", "team")
    assert [row for row in records(report) if row["owner_name"] == f"'{HOSTILE}"]
    assert [row for row in records(report) if row["owner_name"] == TURNED]
    assert {line["owner_name"] for line in json.loads(written(report, "json"))["lines"]} >= {HOSTILE, TURNED}


def test_lone_surrogate_in_a_name_is_written_in_every_format() -> None:
    report = report_of(ledger({owner("a\ud800b", "x"): hours(active=1)}))
    for form in FLEET_FORMATS:
        assert written(report, form).encode("utf-8")


def test_names_cannot_control_the_terminal_or_reverse_a_line() -> None:
    text = written(report_of(small_ledger(), "workload", "team"), "table")
    assert "right?to-left??[31mred" in text
    assert not {"\x1b", "\u202e", "\r"} & set(text)


class Page(HTMLParser):
    """The view of a browser: elements, attributes, and text by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_html_runs_and_loads_nothing_and_shows_names_literally() -> None:
    page = Page(written(report_of(small_ledger(), "workload", "team"), "html"))
    assert not {"script", "img", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.elements}
    links = [attributes.get("href") for _, attributes in page.elements if attributes.get("href")]
    assert links == ["data:,"]
    assert not any(name.startswith("on") or name == "src" for _, attributes in page.elements for name in attributes)
    assert MARKUP in page.texts
    assert f"hours are missing on {MARKUP}" in page.texts
    assert HOSTILE in " ".join(page.texts)


def test_html_has_a_row_per_line_and_a_header_per_column() -> None:
    report = report_of(small_ledger(), "workload", "team")
    page = Page(written(report, "html"))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("tr") == 1 + len(report.held) + len(report.apart) + 1
    assert sum(attributes.get("scope") == "col" for _, attributes in page.elements) == 2 + 16
    assert sum(attributes.get("scope") == "row" for _, attributes in page.elements) == tags.count("tr") - 1


def test_top_shows_the_most_expensive_lines_and_one_line_for_the_rest() -> None:
    report = report_of(small_ledger(), "workload")
    lines = written(report, "table", top=2).splitlines()
    assert [line.split()[0] for line in lines[3:5]] == ["vision/Job/resnet", 'lab/Job/=cmd|"/c']
    assert lines[5].startswith("(3 more)")
    whole, cut = written(report, "table").splitlines(), lines
    assert [line.split() for line in cut if line.startswith("Total")] == [
        line.split() for line in whole if line.startswith("Total")
    ]
    assert "(3 more)" in written(report, "html", top=2)


def test_rest_line_replaces_at_least_two_lines() -> None:
    report = report_of(small_ledger(), "namespace")
    assert "more)" not in written(report, "table", top=3)


def test_json_costs_are_the_sum_of_their_parts() -> None:
    report = make_report(small_ledger(), Question(by=("namespace", "model"), share_idle="even", with_series=True))
    read = json.loads(written(report, "json"))
    assert read == document(report)
    held, apart = ([line for line in read["lines"] if line["held"] is is_held] for is_held in (True, False))
    for figures in (*held, *(one for line in held for one in line["series"])):
        for money in figures["money"]:
            parts = money["active_cost"] + money["idle_cost"] + money["unknown_cost"]
            assert parts == pytest.approx(money["cost"])
            of_active = [money[f"{name}_cost"] or 0.0 for name in ("effective", "ineffective", "unprofiled")]
            assert sum(of_active) == pytest.approx(money["active_cost"])
    for line in apart:
        assert {line[name] for name in ("active_seconds", "idle_seconds", "unknown_seconds", "active_ratio")} == {None}
        assert {money["idle_cost"] for one in (line, *line["series"]) for money in one["money"]} == {None}
    for name in ("active_seconds", "idle_seconds", "unknown_seconds"):
        assert read["total"][name] == pytest.approx(sum(line[name] for line in held))
    assert read["total"]["energy_joules"] == pytest.approx(165.75 * 3.6e6)


def test_unprofiled_time_is_separate_and_never_zero() -> None:
    report = report_of(small_ledger(), "workload")
    resnet, other, *_ = document(report)["lines"]
    assert (resnet["effective_ratio"], resnet["profiled_ratio"]) == (pytest.approx(1 / 3), pytest.approx(0.5))
    assert resnet["unprofiled_seconds"] == pytest.approx(resnet["active_seconds"] / 2)
    assert (other["effective_seconds"], other["ineffective_seconds"], other["effective_ratio"]) == (None, None, None)
    assert other["unprofiled_seconds"] == other["active_seconds"] > 0
    assert {row["effective_hours"] for row in records(report)[1:5]} == {""}
    assert "Unprofiled: a resource was not measured." in written(report, "table")
    bare = written(report_of(ledger({owner("a", "x"): hours(active=3, idle=1, usd=8)})), "table")
    assert "Effective" not in bare
    assert "Unprofiled" not in bare
    assert "active (75.0 %); nothing of what was active was profiled" in bare


def keys_of(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*(keys_of(one) for one in value.values()))
    return set().union(*(keys_of(one) for one in value)) if isinstance(value, list) else set()


def test_every_json_key_and_every_csv_record_is_documented() -> None:
    text = (Path(__file__).parent.parent / "docs" / "cost.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    report = make_report(small_ledger(), Question(by=("namespace",), share_idle="even", with_series=True))
    assert keys_of(document(report)) <= named
    assert {row["record"] for row in records(report)} <= named


@pytest.mark.parametrize("share_idle", ["weighted", "even"])
def test_documented_sharing_example_is_correct(share_idle: ShareIdle) -> None:
    text = (Path(__file__).parent.parent / "docs" / "cost.md").read_text(encoding="utf-8")
    (reported,) = re.findall(rf"^\| `--share-idle {share_idle}` \| (\S+) \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
    lines = {owner(name, "x"): hours(active=1, usd=money) for name, money in (("a", 60), ("b", 30), ("c", 10))}
    report = report_of(ledger({**lines, nobody(UNALLOCATED): hours(idle=1, usd=10)}), share_idle=share_idle)
    assert [row["charged_USD"] for row in records(report)[:3]] == [repr(float(amount)) for amount in reported]


def test_csv_has_only_rounded_owner_lines_without_notes() -> None:
    report = report_of(small_ledger(), "team", share_idle="weighted")
    plain = list(csv.DictReader(io.StringIO(written(report, "csv", with_notes=False), newline="")))
    noted = [row for row in records(report) if row["record"] == "Owner"]
    assert plain == [{name: row[name] for name in plain[0]} for row in noted]
    assert set(noted[0]) - set(plain[0]) == {"record", "ratio", "remark"}
    for row in plain:
        digits = {name: len(value.partition(".")[2]) for name, value in row.items() if re.fullmatch(r"[\d.]+", value)}
        assert all(count <= (3 if name.endswith(("_hours", "_kwh")) else 4) for name, count in digits.items())
        assert all(count <= 2 for name, count in digits.items() if name.endswith(("_USD", "_EUR")))


def test_month_is_compared_with_the_recorded_previous_month() -> None:
    october, september = small_ledger(), ledger({owner("vision", "resnet", "core"): hours(active=100, usd=700.0)})
    report = compared(report_of(october, "team"), report_of(september, "team"))
    document_of = json.loads(written(report, "json"))
    core, markup = document_of["lines"][:2]
    assert (core["before"][0]["cost"], markup["before"]) == (700.0, [])
    rows = {row["team"]: row for row in records(report) if row["record"] == "Owner"}
    assert (rows["core"]["before_USD"], rows["core"]["change_USD"]) == ("700.0", "1400.0")
    assert (rows["core"]["before_EUR"], rows["core"]["change_EUR"]) == ("", "")
    assert "+1,400.00" in written(report, "table")
    assert "+1,400.00" in written(report, "html")
    unpriced = ledger({owner("vision", "resnet", "core"): hours(active=100, unpriced=100.0)})
    (row, *_) = records(compared(report_of(october, "team"), report_of(unpriced, "team")))
    assert (row["before_USD"], row["change_USD"]) == ("", "")
    unknown = replace(september, chunks=(replace(september.chunks[0], recorded_hours={"": 12}),))
    report = compared(report_of(october, "team"), report_of(unknown, "team"))
    for form in FLEET_FORMATS:
        assert "not compared with 2026-10: 50.00 % of it was recorded" in written(report, form)
        assert "Change" not in written(report, form)


def test_empty_report_is_valid_in_every_format() -> None:
    report = report_of(ledger({}))
    assert json.loads(written(report, "json"))["lines"] == []
    for form in FLEET_FORMATS:
        assert "Total" in written(report, form) or form == "json"


@settings(max_examples=40)
@given(ledgers(), st.sampled_from(["none", "even", "weighted"]))
def test_csv_sums_to_its_own_total(known: FleetLedger, share_idle: ShareIdle) -> None:
    report = report_of(known, "workload", "pool", share_idle=share_idle)
    rows = records(report)
    lines = [row for row in rows if row["record"] in {"Owner", "Unattributed", "Unallocated"}]
    (total,) = [row for row in rows if row["record"] == "Total"]
    (capacity,) = [row for row in rows if row["record"] == "Capacity"]
    rounding = 0.5 * (len(lines) + 1) + 1e-6
    assert sum(float(row["gpu_hours"]) for row in lines) == pytest.approx(
        float(capacity["gpu_hours"]), abs=rounding * 1e-3
    )
    for title in total:
        if title.startswith(("cost_", "idle_cost_", "charged_")):
            summed = sum(float(row[title] or 0) for row in lines)
            assert summed == pytest.approx(float(total[title] or 0), abs=rounding * 1e-2)
