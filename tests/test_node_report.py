"""The report of one agent: its figures, its sums, and its message without an agent."""

import asyncio
import csv
import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from agent_support import AgentProcess, matching
from aiohttp import web
from exposition_support import H100, TRAINING, gpu, one_ledger, snapshot
from page_support import changed
from service_support import http_server

from exporter.cli import main
from exporter.cost.dimensions import LineKey
from exporter.cost.node_report import AgentLedger, read, write
from exporter.errors import ExporterError
from exporter.metrics.collector import ExpositionOptions
from exporter.model.attribution import UNALLOCATED, UNATTRIBUTED, Owner, ShareMode
from exporter.model.ledger import Account, ByState, LedgerView, Price, Totals
from exporter.model.snapshot import Snapshot
from exporter.web import node_api
from exporter.web.server import NodeSite, Renderer

AGENT = "http://node-a:9400"


def report_of(view: Snapshot) -> AgentLedger:
    return read(json.loads(node_api.ledger_document(view).plain), AGENT)


def with_capacity(seconds: float, **changes: object) -> Snapshot:
    base = snapshot().metering.ledger
    assert base is not None
    return ledger_of(ledgers=(dataclasses.replace(base.ledgers[0], capacity_seconds=seconds),), **changes)


def ledger_of(**changes: object) -> Snapshot:
    base = snapshot()
    assert base.metering.ledger is not None
    return changed(base, metering={"ledger": dataclasses.replace(base.metering.ledger, **changes)})


def written(view: Snapshot, form: str = "table") -> str:
    stream = io.StringIO()
    write(report_of(view), form, stream, with_notes=True)
    return stream.getvalue()


def row(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line.split()


def test_report_contains_every_account_and_price_of_the_agent() -> None:
    view = snapshot()
    assert view.metering.ledger is not None
    report = report_of(view)
    found = report.lines
    assert len(found) == len(view.metering.ledger.accounts)
    for account, totals in view.metering.ledger.accounts.items():
        own = account.owner
        key = LineKey("", report.node, "", own.namespace, own.kind, own.name, own.team, own.cost_labels, account.model)
        figures = found[key._replace(mode=account.mode.value)]
        assert (figures.seconds, figures.money) == (totals.seconds, totals.money)
        assert (figures.energy_joules or 0.0) == totals.energy_joules
        assert figures.energy_unknown_seconds == totals.energy_unknown_seconds
        assert figures.unpriced_seconds == totals.unpriced_seconds
    assert [price for _, price in report.prices] == list(dict.fromkeys(view.metering.prices.values()))
    assert next(iter(report.prices.values())) == 3


def test_table_lists_owners_first_and_unattributed_and_unallocated_separately() -> None:
    text = written(snapshot())
    assert "SIMULATED" in text
    of_effect = ["0.1389", "27", "%", "0.2500"]
    hours = ["1.0000", "0.7500", "0.1667", "0.0833", "81", "%"]
    assert row(text, "vision/Job/resnet")[-12:] == [*hours, *of_effect, "2.50", "0.42"]
    lines = text.splitlines()
    order = [next(n for n, line in enumerate(lines) if line.startswith(one)) for one in ("vision", "Unatt", "Unall")]
    assert order == sorted(order)
    assert order[1] - order[0] > 1, "a rule is between them"
    assert row(text, "Unattributed")[-2:] == ["no", "price"]
    assert row(text, "Total")[-12:-2] == ["2.0000", *hours[1:], *of_effect], "the figures are those of owners"
    assert row(text, "Total")[-2:] == ["4.95*", "0.42"]


def test_a_long_name_stays_on_one_line_of_a_file() -> None:
    long = dataclasses.replace(TRAINING, owner=dataclasses.replace(TRAINING.owner, name="resnet-" + "x" * 150))
    text = written(ledger_of(ledgers=one_ledger({long: Totals(seconds=ByState(idle=3600.0))})))
    assert f"vision/Job/{long.owner.name} " in text


def test_one_owner_with_several_cost_labels_has_one_line() -> None:
    other = dataclasses.replace(TRAINING, owner=dataclasses.replace(TRAINING.owner, cost_labels="project=other"))
    hour = Totals(seconds=ByState(unprofiled=3600.0))
    text = written(ledger_of(ledgers=one_ledger({TRAINING: hour, other: hour})))
    assert (
        row(text, "vision/Job/resnet")[-4:]
        == row(written(ledger_of(ledgers=one_ledger({TRAINING: hour + hour}))), "vision/Job/resnet")[-4:]
    )


def test_footer_shows_how_far_the_report_can_be_trusted() -> None:
    text = written(snapshot())
    assert "2.0000 of 2.0000 GPU-hours metered, conservation error 1.0e-12 s" in text
    assert "94.83%" in text
    assert "2025-10-09 07:56:40 UTC to 2025-10-09 08:56:37 UTC; totals as of the last save" in text
    assert f"3 x {H100}: 2.5 USD/h now, fleet:h100 as of 2026-10-01" in text
    assert "GPUs are 80% of a node's price" in text
    assert "matches 1 GPU(s)" in text
    assert "0.0200 GPU-hours had no price and are in no cost" in text
    assert "not known yet" not in text


def test_pods_without_a_known_owner_are_reported_as_missing_seconds() -> None:
    text = written(with_capacity(7200.0, withheld_seconds=50.0))
    assert "50 s are of pods whose owner is not known yet" in text
    assert "bug" not in text
    for wrong in (7000.0, 7250.0):
        assert "s have no owner: please report this as a bug" in written(with_capacity(wrong))


def test_memory_only_ledger_is_reported_with_its_reason() -> None:
    text = written(ledger_of(saved_at_seconds=None, state_problem="/var/lib/x: disk full; free some space"))
    assert "in memory only" in text
    assert "disk full; free some space" in text


def test_lines_are_sorted_by_cost_then_hours_with_special_owners_last() -> None:
    def account(owner: Owner) -> Account:
        return Account(owner=owner, model=H100, mode=ShareMode.EXCLUSIVE)

    accounts = {
        account(UNALLOCATED): Totals(seconds=ByState(idle=99.0), money={"USD": ByState(unprofiled=99.0)}),
        account(UNATTRIBUTED): Totals(seconds=ByState(idle=1.0)),
        account(Owner(namespace="long")): Totals(seconds=ByState(idle=50.0)),
        account(Owner(namespace="dear")): Totals(seconds=ByState(idle=1.0), money={"USD": ByState(unprofiled=9.0)}),
        account(Owner(namespace="longer")): Totals(seconds=ByState(idle=60.0)),
    }
    report = report_of(changed(snapshot(), metering={"ledger": LedgerView(ledgers=one_ledger(accounts))}))
    assert [one.key.namespace for one in report.report("owner").held] == ["dear", "longer", "long"]
    assert [one.key.kind for one in report.report("owner").apart] == ["Unattributed", "Unallocated"]


def test_currencies_have_separate_columns_and_small_amounts_are_not_zero() -> None:
    both = Totals(
        seconds=ByState(unprofiled=36.0),
        money={"USD": ByState(unprofiled=0.001), "EUR": ByState(unprofiled=1999.5, idle=1.0)},
    )
    text = written(ledger_of(ledgers=one_ledger({TRAINING: both})))
    assert row(text, "vision")[-4:] == ["2,000.50", "1.00", "<0.01", "0.00"]
    assert "Cost EUR" in text
    assert "Cost USD" in text


def test_unpriced_report_shows_no_cost_instead_of_zero() -> None:
    unpriced = Totals(seconds=ByState(unprofiled=36.0), unpriced_seconds=36.0)
    text = written(changed(ledger_of(ledgers=one_ledger({TRAINING: unpriced})), metering={"prices": {}}))
    assert row(text, "Total")[-2:] == ["no", "price"]
    assert "0.00 " not in row(text, "vision")


def test_bundled_list_price_and_energy_price_are_shown() -> None:
    price = Price(per_hour=1.2, currency="USD", source="list:h100", as_of="2026-09-01", per_kwh=0.3, fallback=True)
    text = written(changed(snapshot(), metering={"prices": {gpu(0).uuid: price}}))
    assert "1.2 USD/h and 0.3 per measured kWh now, list:h100 as of 2026-09-01, a bundled list price" in text


def test_csv_has_a_row_per_line_and_empty_cells_for_unknown_values() -> None:
    work, nobody_known, free, *foot = csv.DictReader(io.StringIO(written(snapshot(), "csv")))
    assert (work["node"], work["record"], foot[0]["record"], foot[1]["gpu_hours"]) == (
        "node-a",
        "Owner",
        "Total",
        "2.0",
    )
    assert (work["owner_name"], work["team"], float(work["gpu_hours"])) == ("resnet", "perception", 1.0)
    assert (float(work["cost_USD"]), float(work["energy_kwh"])) == (2.5, pytest.approx(0.50000014))
    assert (nobody_known["cost_USD"], nobody_known["energy_kwh"]) == ("", "")
    assert free["owner_kind"] == "Unallocated"
    total = sum(float(one["gpu_hours"]) for one in (work, nobody_known, free))
    assert total == pytest.approx(2.0, rel=1e-12)
    assert {one[name] for one in (nobody_known, free) for name in ("active_hours", "idle_hours")} == {""}
    stream = io.StringIO()
    write(report_of(snapshot()), "csv", stream)
    assert [one["owner_name"] for one in csv.DictReader(io.StringIO(stream.getvalue()))] == ["resnet"]


def test_json_has_lines_total_and_coverage() -> None:
    document = json.loads(written(snapshot(), "json"))
    assert [line["owner_kind"] for line in document["lines"]] == ["Job", "Unattributed", "Unallocated"]
    assert document["lines"][1]["money"] == []
    assert document["lines"][2]["idle_seconds"] is None
    assert document["total"]["idle_seconds"] == document["lines"][0]["idle_seconds"]
    assert document["total"]["allocated_seconds"] == document["capacity_seconds"] == 7200.0
    assert document["missing_seconds"] == 0.0
    assert document["coverage_ratio"] == pytest.approx(1 - 372 / 7200)


def test_name_cannot_control_the_terminal_or_be_a_formula() -> None:
    evil = dataclasses.replace(TRAINING, owner=Owner(namespace="=cmd()\x1b[31m"))
    view = ledger_of(ledgers=one_ledger({evil: Totals(seconds=ByState(unprofiled=1.0))}))
    assert "\x1b" not in written(view)
    assert "'=cmd()\x1b[31m" in written(view, "csv")


def test_agent_without_metered_samples_is_distinct_from_an_empty_ledger() -> None:
    with pytest.raises(ExporterError, match="has not metered anything yet; http://node-a:9400/readyz shows"):
        report_of(changed(snapshot(), metering={"ledger": None}))
    empty = written(changed(snapshot(), metering={"ledger": LedgerView(ledgers=one_ledger({}))}))
    assert "0.0000 of 0.0000 GPU-hours metered" in empty
    assert "Coverage" not in empty


@pytest.mark.parametrize(
    "broken",
    [
        {"accounts": [{}]},
        {"accounts": 7},
        {"capacity_seconds": "x"},
        {"prices": [1]},
        {"started_at_seconds": 1e30},
        {"taken_at_seconds": float("nan"), "saved_at_seconds": None},
    ],
)
def test_invalid_ledger_answer_gives_one_clear_line(broken: dict[str, object]) -> None:
    document = {**json.loads(node_api.ledger_document(snapshot()).plain), **broken}
    with pytest.raises(ExporterError, match=r"^http://node-a:9400: the answer is not an agent's ledger: "):
        read(document, AGENT)


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    async with http_server(app) as port:
        yield f"127.0.0.1:{port}"


def agent(newest: Callable[[], Snapshot | None]) -> web.Application:
    return NodeSite(snapshot=newest, renderer=Renderer(ExpositionOptions(), list), release=lambda _: None).app()


def answering(body: str, status: int = 200, server: str = "nginx") -> web.Application:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text=body, status=status, headers={"Server": server})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    return app


async def test_report_reads_a_running_agent(capsys: pytest.CaptureFixture[str]) -> None:
    async with served(agent(snapshot)) as address:
        code = await asyncio.to_thread(main, ["report", "--agent", f"http://{address}/", "--format", "csv"])
        out, err = capsys.readouterr()
        options = ["--agent", f"http://{address}/", "--by", "label:nope"]
        unknown = await asyncio.to_thread(main, ["report", *options])
    assert (code, err) == (0, "")
    assert "resnet" in out
    assert unknown == 2
    assert "no line has the label nope; labels of this period:" in capsys.readouterr().err


def test_demo_report_sums_to_the_elapsed_capacity(demo_agent: AgentProcess, capsys: pytest.CaptureFixture[str]) -> None:
    demo_agent.until(lambda page: bool(matching(page, "gpu_ledger_cost_total")), "a priced interval")
    assert main(["report", "--agent", f"http://127.0.0.1:{demo_agent.port}", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    reported = document["total"]["allocated_seconds"] + document["withheld_seconds"]
    assert reported == pytest.approx(document["capacity_seconds"], rel=1e-9)
    assert document["capacity_seconds"] > 0
    assert document["missing_seconds"] == 0.0
    kinds = {line["owner_kind"] for line in document["lines"]}
    assert "Unallocated" in kinds
    assert document["prices"], "the bundled book has a price for the demo's model"


@pytest.mark.parametrize(
    ("app", "reported"),
    [
        (agent(lambda: None), "the agent has only just started; ask again in a few seconds"),
        (answering("<html>"), "the server there is not an agent; give the address of its --listen"),
        (answering("no", 404), "the server there is not an agent (HTTP 404)"),
        (answering("no", 404, "gpu-cost-exporter"), "this agent is of a release without /api/v1/ledger; update it"),
        (
            answering('{"error": "the API is described at /openapi.json"}', 404, "gpu-cost-exporter"),
            "this is the cost service, not an agent; give an agent's address (port 9400), or --prometheus URL",
        ),
        (answering("no", 500, "gpu-cost-exporter"), "the agent answers HTTP 500; its log has the cause"),
        (
            answering('{"api_version": 2, "accounts": []}'),
            "speaks version 2 of its API, this program",
        ),
        (answering('{"status": "ok"}'), "the server there is not an agent"),
    ],
)
async def test_each_wrong_server_is_reported_with_its_fix(
    app: web.Application, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(app) as address:
        code = await asyncio.to_thread(main, ["report", "--agent", address])
    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    assert reported in err
    assert err.count("\n") == 1


def test_unreachable_agent_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--agent", "http://127.0.0.1:9"]) == 1
    err = capsys.readouterr().err
    assert "cannot reach the agent: connection refused; is it running" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "address", ["", "ftp://node-a", "http://", "http://a:99999", "http://a/api", "http://a b", "http://u:p@a", "a:x"]
)
def test_invalid_address_is_a_usage_error(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--agent", address]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gpu-cost-exporter: --agent: value '")
    assert "http://node-a:9400" in err


def test_report_without_agent_names_the_missing_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 2
    assert "--agent" in capsys.readouterr().err
    assert main(["report", "--agent", "a", "--formt", "csv"]) == 2
    assert "did you mean '--format'?" in capsys.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_narrow_terminal_wraps_lines_without_cutting_names_or_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = _Terminal()
    write(report_of(snapshot()), "table", stream)
    assert "vision/Job/resnet" in stream.getvalue()
    assert "…" not in stream.getvalue()


def test_team_column_is_shown_only_if_an_owner_has_a_team() -> None:
    assert "Team" in written(snapshot())
    nobody = dataclasses.replace(TRAINING, owner=Owner(namespace="vision"))
    text = written(ledger_of(ledgers=one_ledger({nobody: Totals(seconds=ByState(unprofiled=3600.0))})))
    assert "Team" not in text
    assert row(text, "vision")[-6:] == ["1.0000", "1.0000", "0.0000", "0.0000", "100", "%"]


async def test_https_to_an_http_agent_is_reported_with_its_fix(capsys: pytest.CaptureFixture[str]) -> None:
    async with served(agent(snapshot)) as address:
        assert await asyncio.to_thread(main, ["report", "--agent", f"https://{address}"]) == 1
    assert "does the agent have a --web-config with TLS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "reported"), [("/dev/full", "standard output: cannot write: No space left"), ("", "")]
)
def test_unwritable_output_is_one_line_and_a_closed_pipe_is_silent(target: str, reported: str) -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    with open(target, "w") if target else os.fdopen(writing_end, "w") as stream:  # noqa: PTH123 - a device
        command = [sys.executable, "-m", "exporter", "prices", "list"]
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
        assert done.returncode == 1
        assert reported in done.stderr
        assert done.stderr.count("\n") == (1 if reported else 0)
