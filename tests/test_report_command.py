"""`report` of a fleet as users run it: against real servers, into real files, with real mistakes."""

import asyncio
import csv
import io
import json
import os
import pty
import select
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fleet_support import FleetServer, truth_between
from focus_support import assert_promises

from exporter.cli import main
from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost.dimensions import pairs
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.store import ALL_OF_A_DAY, DayStore
from exporter.cost.window import DAY_SECONDS, Window

FIRST, LAST = "2026-09-10", "2026-09-15"
WINDOW = f"{FIRST}..{LAST}"
APART = {"Unallocated", "Unattributed"}


def seconds(day: str) -> int:
    return int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp())


START, END = seconds(FIRST), seconds(LAST) + DAY_SECONDS


@pytest.fixture(autouse=True)
def _no_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GPU_COST_EXPORTER_")]:
        monkeypatch.delenv(name)


def report(server: str, *options: str, window: str = WINDOW) -> list[str]:
    return ["report", "--prometheus", server, "--window", window, *options]


def document(capsys: pytest.CaptureFixture[str], server: str, *options: str) -> dict[str, Any]:
    assert main(report(server, "--format", "json", *options)) == 0
    shown = capsys.readouterr()
    assert shown.err == "", "there is no terminal for progress"
    found: dict[str, Any] = json.loads(shown.out)
    return found


def money(line: dict[str, Any], currency: str) -> float:
    return sum(one["cost"] for one in line["money"] if one["currency"] == currency)


@pytest.mark.parametrize("engine", ["fleet_prometheus", "fleet_victoria"])
def test_team_figures_match_the_truth(
    engine: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    server: FleetServer = request.getfixturevalue(engine)
    truth = truth_between(START, END, server.plan)
    reported = document(capsys, server.url, "--by", "cluster,team")
    lines = {(line["cluster"], line["team"] or "", line["owner_kind"] or ""): line for line in reported["lines"]}
    true = truth.total("cluster", "kind", "team")
    expected: dict[tuple[str, str, str], list[Any]] = {}
    for (cluster, kind, team), totals in true.items():
        apart = kind if kind in APART else ""
        expected.setdefault((cluster, team, apart), []).append(totals)
    assert set(lines) == set(expected)
    for key, many in expected.items():
        line = lines[key]
        assert line["allocated_seconds"] == pytest.approx(sum(one.seconds.total for one in many), rel=1e-9)
        idle = None if key[2] else pytest.approx(sum(one.seconds.idle for one in many), rel=1e-9)
        assert line["idle_seconds"] == idle, "time without an owner is not idle"
        for currency in ("USD", "EUR"):
            true_money = sum(one.money[currency].total for one in many if currency in one.money)
            assert money(line, currency) == pytest.approx(true_money, rel=1e-9)
    assert reported["trust"]["whole"]
    assert reported["trust"]["capacity_seconds"] == pytest.approx(truth.capacity_seconds, rel=1e-9)
    assert reported["simulated"]


def test_days_in_a_time_zone_are_exact_and_sum_to_the_whole_window(
    fleet_prometheus: FleetServer, capsys: pytest.CaptureFixture[str]
) -> None:
    together = 0.0
    for number, day in enumerate(("2026-09-11", "2026-09-12")):
        reported = document(capsys, fleet_prometheus.url, "--timezone", "Europe/Berlin", "--window", day)
        start = START + number * DAY_SECONDS + 22 * 3600
        assert (reported["window"]["from_seconds"], reported["window"]["to_seconds"]) == (start, start + DAY_SECONDS)
        truth = truth_between(start, start + DAY_SECONDS, fleet_prometheus.plan)
        assert reported["trust"]["capacity_seconds"] == pytest.approx(truth.capacity_seconds, rel=1e-9)
        assert reported["trust"]["whole"]
        together += reported["total"]["allocated_seconds"]
    both = document(capsys, fleet_prometheus.url, "--timezone", "Europe/Berlin", "--window", "2026-09-11..2026-09-12")
    assert both["total"]["allocated_seconds"] == pytest.approx(together, rel=1e-12)


def test_half_hour_time_zone_is_refused(fleet_prometheus: FleetServer, capsys: pytest.CaptureFixture[str]) -> None:
    indian = "2026-09-11T00:00+05:30..2026-09-12T00:00+05:30"
    assert main(report(fleet_prometheus.url, window=indian)) == 2
    shown = capsys.readouterr()
    assert "begins at 2026-09-10 18:30:00 UTC, within an hour" in shown.err
    assert "such as 2026-09-10T18:00Z..2026-09-11T19:00Z" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("form", ["table", "focus"])
def test_coverage_below_the_minimum_exits_with_3_and_is_not_called_complete(
    form: str, fleet_prometheus: FleetServer, capsys: pytest.CaptureFixture[str]
) -> None:
    # Three hours of 2026-08-25 and 2026-08-26 were not recorded.
    command = report(fleet_prometheus.url, "--format", form, window="2026-08-25..2026-08-26")
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "nothing is missing" not in out
    assert ("no sum includes other hours" in out) is (form == "table")
    assert main([*command, "--min-coverage", "90%"]) == 0
    capsys.readouterr()
    assert main([*command, "--min-coverage", "0.99"]) == 3
    shown = capsys.readouterr()
    assert "93.75 % of the hours were recorded (90 of 96), less than --min-coverage 99.00 %" in shown.err
    assert shown.out == out, "the report is still written"
    for wrong in ("1.1", "-1", "much", "nan"):
        assert main([*command, "--min-coverage", wrong]) == 2
        assert "is not a part; allowed: 0 to 1, or 0% to 100%" in capsys.readouterr().err


def test_filters_and_dimension_names_select_lines(
    fleet_prometheus: FleetServer, capsys: pytest.CaptureFixture[str]
) -> None:
    every = document(capsys, fleet_prometheus.url, "--by", "namespace")
    names = [line["owner_namespace"] for line in every["lines"] if line["owner_namespace"]]
    reported = document(
        capsys, fleet_prometheus.url, "--by", "node pool,workload", "--filter", f"namespace={names[0]},{names[1]}"
    )
    assert reported["by"] == ["pool", "workload"]
    assert {line["owner_namespace"] for line in reported["lines"]} == set(names[:2])
    assert {"p5.48xlarge on-demand"} < {line["pool"] for line in reported["lines"]}
    assert all(line["owner_kind"] and line["owner_name"] for line in reported["lines"])
    whole = sum(line["allocated_seconds"] for line in every["lines"] if line["owner_namespace"] in names[:2])
    assert reported["total"]["allocated_seconds"] == pytest.approx(whole)


@pytest.mark.parametrize("engine", ["fleet_prometheus", "fleet_victoria"])
def test_labels_are_dimensions_and_filters(
    engine: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server: FleetServer = request.getfixturevalue(engine)
    true: dict[tuple[str, str], float] = {}
    for (labels, team, kind), totals in truth_between(START, END, server.plan).total("labels", "team", "kind").items():
        if kind not in APART:
            place = (pairs(labels).get("project", ""), team)
            true[place] = true.get(place, 0.0) + totals.seconds.total
    reported = document(capsys, server.url, "--by", "label:project,team")
    held = [line for line in reported["lines"] if line["held"]]
    found = {((line["labels"] or {}).get("project", ""), line["team"] or ""): line for line in held}
    assert {place: line["allocated_seconds"] for place, line in found.items()} == pytest.approx(true)
    team = next(team for project, team in true if project == "sweep" and team)
    some = document(
        capsys, server.url, "--by", "workload", "--filter", "label:project=sweep,", "--filter", f"team={team}"
    )
    assert sum(line["allocated_seconds"] for line in some["lines"]) == pytest.approx(
        sum(seconds for (project, of), seconds in true.items() if project in {"sweep", ""} and of == team)
    )
    path = tmp_path / "projects.csv"
    assert main(report(server.url, "--by", "label:project", "--format", "csv", "--output", str(path))) == 0
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert {row["label:project"] for row in rows} == {project for project, _ in true}
    assert main(report(server.url, "--by", "label:project")) == 0
    assert "(no project)" in capsys.readouterr().out
    assert main(report(server.url, "--by", "label:projects")) == 2
    assert "no line has the label projects; labels of this period: environment, project" in capsys.readouterr().err


def test_unmatched_filter_value_gives_a_warning(
    fleet_prometheus: FleetServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(report(fleet_prometheus.url, "--filter", "team=nobodies")) == 0
    shown = capsys.readouterr()
    assert "nothing matches team nobodies" in shown.err
    assert "nothing matches team nobodies" in shown.out


def test_shared_cost_sums_to_the_cent(fleet_prometheus: FleetServer, tmp_path: Path) -> None:
    path = tmp_path / "charged.csv"
    options = ("--by", "workload", "--share-idle", "weighted", "--share-unallocated", "--format", "csv", "--with-notes")
    assert main(report(fleet_prometheus.url, *options, "--output", str(path))) == 0
    rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))
    (total,) = [row for row in rows if row["record"] == "Total"]
    for currency in ("USD", "EUR"):
        charged = [row[f"charged_{currency}"] for row in rows if row["record"] not in {"Total", *APART}]
        cents = sum(round(float(amount) * 100) for amount in charged if amount)
        assert cents == round(float(total[f"cost_{currency}"]) * 100)
        apart = [row for row in rows if row["record"] in APART and row[f"cost_{currency}"]]
        assert apart
        assert all(float(row[f"charged_{currency}"]) == 0 for row in apart)


def test_price_book_reprices_the_report(
    fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book.yaml"
    book.write_text(
        "currency: CHF\nlist_prices: off\nrows:\n- {node: '*', per_gpu_hour: 2, source: contract, as_of: 2026-01-01}\n",
        encoding="utf-8",
    )
    reported = document(capsys, fleet_prometheus.url, "--price-book", str(book))
    assert [one["currency"] for one in reported["total"]["money"]] == ["CHF"]
    assert money(reported["total"], "CHF") == pytest.approx(reported["total"]["allocated_seconds"] / 3600 * 2)
    assert reported["prices"].startswith("book.yaml")
    assert any("at the prices of the time of use it was" in note for note in reported["trust"]["notes"])


def test_focus_file_has_a_metadata_file_next_to_it(
    fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "focus.csv"
    unpriced = f"2026-08-20..{LAST}"
    assert main(report(fleet_prometheus.url, "--format", "focus", "--output", str(path), window=unpriced)) == 0
    truth = truth_between(seconds("2026-08-20"), END, fleet_prometheus.plan).sum()
    assert truth.unpriced_seconds > 0
    reported = f"warning: {truth.unpriced_seconds / 3600:.1f} GPU-hours had no price and are in no cost"
    assert reported in capsys.readouterr().err
    assert_promises(path.read_text(encoding="utf-8"), "1.4")
    metadata = json.loads((tmp_path / "focus.csv.metadata.json").read_text(encoding="utf-8"))
    reported = document(capsys, fleet_prometheus.url, "--window", unpriced)
    for currency in ("USD", "EUR"):
        cost = float(metadata["x_Conservation"]["EffectiveCost"][currency])
        assert cost == pytest.approx(money(reported["total"], currency), abs=1e-4)


def test_focus_file_has_account_provider_and_correction_flag(fleet_prometheus: FleetServer, tmp_path: Path) -> None:
    path = tmp_path / "focus.csv"
    options = ["--focus-billing-account", "4711", "--focus-billing-account-name", "=GPUs", "--focus-provider", "Our DC"]
    command = report(fleet_prometheus.url, "--format", "focus", "--output", str(path), window=FIRST)
    assert main([*command, *options, "--focus-restated"]) == 0
    assert_promises(path.read_text(encoding="utf-8"), "1.4")
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert rows
    columns = ("BillingAccountId", "BillingAccountName", "ChargeClass", "InvoiceIssuerName", "ServiceProviderName")
    reported = {tuple(row[column] for column in columns) for row in rows}
    assert reported == {("4711", "'=GPUs", "Correction", "Our DC", "Our DC")}
    assert main(command) == 0
    with path.open(encoding="utf-8", newline="") as stream:
        reported = {tuple(row[column] for column in columns) for row in csv.DictReader(stream)}
    assert reported == {("on-prem", "", "", "Internal", "Internal")}


def test_focus_metadata_of_a_filtered_report_has_the_filter(
    fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, beside = tmp_path / "focus.csv", tmp_path / "focus.csv.metadata.json"
    command = report(fleet_prometheus.url, "--format", "focus", "--output", str(path), window=FIRST)
    assert main([*command, "--filter", "cluster=alpha"]) == 0
    assert capsys.readouterr().err == ""
    assert json.loads(beside.read_text(encoding="utf-8"))["x_Filter"] == "cluster alpha"
    assert main([*command, "--filter", "cluster=gamma"]) == 0
    assert "warning: nothing matches cluster gamma" in capsys.readouterr().err
    assert main(command) == 0
    assert json.loads(beside.read_text(encoding="utf-8"))["x_Filter"] is None


def test_unwritable_metadata_file_is_reported_before_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "focus.csv.metadata.json").mkdir()
    command = [
        "report",
        "--store",
        str(tmp_path / "none"),
        "--format",
        "focus",
        "--output",
        str(tmp_path / "focus.csv"),
    ]
    assert main(command) == 2
    assert "focus.csv.metadata.json is a directory" in capsys.readouterr().err


def test_store_is_read_alone_or_with_prometheus(
    fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "days.sqlite"
    fill(store, fleet_prometheus.url, days=2)
    first_two = f"{FIRST}..2026-09-11"
    assert main(["report", "--store", str(store), "--window", first_two, "--format", "json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert main(report(fleet_prometheus.url, "--format", "json", window=first_two)) == 0
    asked = json.loads(capsys.readouterr().out)
    assert stored["engine"] == "store of closed days"
    assert stored["trust"]["whole"]
    for mine, theirs in zip(stored["lines"], asked["lines"], strict=True):
        assert mine["owner_namespace"] == theirs["owner_namespace"]
        assert mine["allocated_seconds"] == pytest.approx(theirs["allocated_seconds"])
    together = document(capsys, fleet_prometheus.url, "--store", str(store))
    alone = document(capsys, fleet_prometheus.url)
    assert together["engine"].startswith("store of closed days, Prometheus")
    assert money(together["total"], "USD") == pytest.approx(money(alone["total"], "USD"))


def test_days_missing_in_the_store_make_the_report_partial(
    fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "days.sqlite"
    fill(store, fleet_prometheus.url, days=1)
    assert main(["report", "--store", str(store), "--window", WINDOW]) == 3
    shown = capsys.readouterr()
    assert "is not closed" in shown.out
    assert "the report is not whole: 5 failed queries" in shown.err


def fill(store: Path, url: str, days: int) -> None:
    """Close the first days of the window from the data of Prometheus."""

    async def read() -> None:
        async with PrometheusClient(PrometheusSettings(url=url)) as client:
            for number in range(days):
                start = START + number * DAY_SECONDS
                day = Window(start_seconds=start, end_seconds=start + DAY_SECONDS)
                ledger = await PrometheusLedger(client).ledger(day, ALL_OF_A_DAY)
                opened.close_day(ledger, now=float(END))

    with DayStore(store).writing(float(END)) as opened:
        asyncio.run(read())


@contextmanager
def between(url: str, refuse: Callable[[str], bool] = lambda _: False, delay_seconds: float = 0.0) -> Iterator[str]:
    """Run a real server in front of another one: it refuses some queries, and delays its answers."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if refuse(body.decode()):
                self.send_error(503, "overloaded")
                return
            time.sleep(delay_seconds)
            headers = {name: self.headers[name] for name in ("Content-Type",) if self.headers[name]}
            asked = urllib.request.Request(url + self.path, data=body or None, headers=headers)  # noqa: S310
            try:
                with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310 - our own server
                    status, content = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                status, content = error.code, error.read()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _answer  # noqa: N815 - the names that the base class calls

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("form", ["table", "csv", "json", "html", "focus"])
def test_failed_query_is_reported_in_every_format(
    form: str, fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report"
    with between(fleet_prometheus.url, lambda body: "quantity%3D%22cost%22" in body) as url:
        notes = ("--with-notes",) if form == "csv" else ()
        options = ("--prometheus-retries", "0", "--format", form, *notes, "--output", str(path))
        code = main(report(url, *options))
    assert "the report is not whole" in capsys.readouterr().err
    assert code == 3
    beside = path.with_name("report.metadata.json")
    text = (beside if form == "focus" else path).read_text(encoding="utf-8")
    assert ("owner" if form == "focus" else "workload") + ":gpu_ledger:delta1h{quantity=" in text
    assert "503" in text


def test_empty_ledger_and_failed_report_keep_the_old_file(
    fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.csv"
    path.write_text("of yesterday\n", encoding="utf-8")
    assert main(report(fleet_prometheus.url, "--output", str(path), window="2025-01")) == 1
    assert "there is no ledger in this period" in capsys.readouterr().err
    with between(fleet_prometheus.url) as gone:
        pass
    assert main(report(gone, "--output", str(path), "--prometheus-retries", "0")) == 1
    assert capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "of yesterday\n"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_the_old_file(fleet_prometheus: FleetServer, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("of yesterday\n", encoding="utf-8")
    command = [sys.executable, "-m", "exporter", *report(fleet_prometheus.url)]
    command += ["--by", "workload,node", "--format", "json", "--output", str(path)]
    limited = subprocess.run(
        ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *command], check=False, capture_output=True, text=True
    )
    assert limited.returncode == 1
    assert f"{path}: cannot write: File too large" in limited.stderr
    assert path.read_text(encoding="utf-8") == "of yesterday\n"
    assert list(tmp_path.iterdir()) == [path]


def test_leftover_part_file_of_a_killed_process_is_ignored(fleet_prometheus: FleetServer, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "exporter", *report(fleet_prometheus.url, window=FIRST)]
    command += ["--format", "json", "--output", str(path)]
    left = f'touch "{tmp_path}/.report.json.$$.part"; exec "$@"'
    done = subprocess.run(["bash", "-c", left, "bash", *command], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(path.read_text(encoding="utf-8"))["lines"]


def test_output_file_keeps_its_mode_and_a_symlink_stays(fleet_prometheus: FleetServer, tmp_path: Path) -> None:
    path, link = tmp_path / "report.txt", tmp_path / "latest"
    path.write_text("of yesterday\n", encoding="utf-8")
    path.chmod(0o640)
    link.symlink_to(path.name)
    assert main(report(fleet_prometheus.url, "--output", str(link))) == 0
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert "GPU cost, 2026-09-10" in path.read_text(encoding="utf-8")


def test_output_to_a_device_does_not_replace_it(
    fleet_prometheus: FleetServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(report(fleet_prometheus.url, "--output", "/dev/null")) == 0
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert main(report(fleet_prometheus.url, "--output", "/dev/full")) == 1
    assert "/dev/full: cannot write: No space left on device" in capsys.readouterr().err


def test_dash_writes_to_standard_output(
    fleet_prometheus: FleetServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(report(fleet_prometheus.url, "--format", "csv", "--output", "-")) == 0
    assert capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def at_a_terminal(command: list[str]) -> tuple[int, str]:
    """Run a command with a terminal as its standard error; return the exit code and the output on the terminal."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        )
        os.close(theirs)
        sent = b""
        while process.poll() is None or select.select([terminal], [], [], 0)[0]:
            if not select.select([terminal], [], [], 0.1)[0]:
                continue
            try:
                sent += os.read(terminal.fileno(), 65_536)
            except OSError:
                break
        return process.wait(timeout=60), sent.decode(errors="replace")


def test_progress_is_shown_on_a_terminal_and_not_on_a_pipe(fleet_prometheus: FleetServer) -> None:
    with between(fleet_prometheus.url, delay_seconds=0.6) as slow:
        command = [sys.executable, "-m", "exporter", *report(slow, "--prometheus-concurrency", "1")]
        code, sent = at_a_terminal(command)
        assert code == 0
        assert "Reading" in sent
        assert "%" in sent
        assert "0:0" in sent, "the remaining time is shown"
        piped = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (piped.returncode, piped.stderr) == (0, "")


def test_fast_report_shows_no_progress_bar(fleet_prometheus: FleetServer) -> None:
    command = [sys.executable, "-m", "exporter", *report(fleet_prometheus.url, window=FIRST)]
    code, sent = at_a_terminal(command)
    assert code == 0
    assert "Reading" not in sent


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "gpu-cost-exporter: no source given; give --prometheus URL or --store FILE for a fleet, --agent URL"),
        (["--agent", "http://n:9400", "--window", "7d"], "--window: is for a fleet, and --agent reports one node"),
        (["--agent", "http://n:9400", "--prometheus", "http://p"], "--prometheus: is for a fleet"),
        (["--agent", "http://n:9400", "--by", "pool"], "--by: value 'pool' is not for one node; allowed: owner"),
        (["--agent", "http://n:9400", "--format", "html"], "--format: value 'html' is not for one node"),
        (
            ["--store", "f", "--by", "team,tems"],
            "'tems' is not a dimension; did you mean 'team'? Allowed: cluster, node,",
        ),
        (["--store", "f", "--by", "owner"], "a fleet has owners by workload"),
        (["--store", "f", "--by", "team,team"], "--by: team is named twice"),
        (["--store", "f", "--by", "label:"], "--by: value 'label:' names no label; allowed: label:KEY"),
        (["--store", "f", "--filter", "label:a b=c"], "--filter: value 'label:a b' names no label"),
        (["--store", "f", "--by", ",".join(f"label:k{n}" for n in range(9))], "names 9 labels; allowed: at most 8"),
        (["--store", "f", "--filter", "vision"], "--filter: value 'vision' has no ="),
        (["--store", "f", "--filter", "team=a", "--filter", "team=b"], "team is named twice; give all its values"),
        (["--store", "f", "--share-unallocated"], "give --share-idle even or weighted, too"),
        (["--store", "f", "--share-idle", "none", "--share-unallocated"], "give --share-idle even or weighted, too"),
        (["--store", "f", "--top", "3", "--format", "csv"], "--top: csv has every line"),
        (["--store", "f", "--with-notes"], "--with-notes: table has them already; leave it out, or take csv"),
        (["--store", "f", "--top", "0"], "value '0' is not a whole number in range; allowed: 1 to 1000000"),
        (["--store", "f", "--focus-version", "1.2"], "does nothing without --format focus"),
        (["--store", "f", "--focus-provider", "x"], "--focus-provider: does nothing without --format focus"),
        (["--store", "f", "--focus-restated"], "--focus-restated: does nothing without --format focus"),
        (["--store", "f", "--format", "focus", "--focus-billing-account", " "], "value ' ' is not a name"),
        (["--agent", "http://n:9400", "--focus-restated"], "--focus-restated: is for a fleet"),
        (["--store", "f", "--window", ""], "--window: value '' is not a period"),
        (["--store", "f", "--by", ""], "--by: value '' is not a dimension"),
        (["--store", "f", "--format", "focus", "--by", "team"], "--by: FOCUS defines its own rows"),
        (["--store", "f", "--format", "focus", "--filter", "team=a"], "--filter: team would leave out parts"),
        (["--store", "f", "--window", "yesterweek"], "--window: value 'yesterweek' is not a period"),
        (["--store", "f", "--output", "/nowhere/at/all"], "--output: /nowhere/at is no directory"),
        (["--store", "f", "--output", "/"], "--output: / is a directory"),
        (["--store", "f", "--price-book", "/nowhere"], "price-book: cannot read /nowhere"),
    ],
)
def test_contradicting_options_are_refused_with_the_fix(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *options]) == 2
    assert words in capsys.readouterr().err


def test_all_mistakes_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--by", "x", "--filter", "y", "--window", "z", "--share-unallocated", "--topp", "3"]) == 2
    reported = capsys.readouterr().err.splitlines()
    assert len(reported) == 6
    assert any("did you mean '--top'?" in line for line in reported)


def test_missing_store_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--store", str(tmp_path / "none.sqlite")]) == 1
    assert "none.sqlite" in capsys.readouterr().err


def test_url_is_read_from_the_environment(
    fleet_prometheus: FleetServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPU_COST_EXPORTER_PROMETHEUS", fleet_prometheus.url)
    assert main(["report", "--window", FIRST, "--top", "1"]) == 0
    assert "more)" in capsys.readouterr().out
