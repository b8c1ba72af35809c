"""Hostile names: in series, logs, terminals, files and queries."""

import asyncio
import contextlib
import csv
import dataclasses
import io
import json
import logging
import os
import pty
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from exposition_support import exclusive, one_ledger, snapshot
from fleet_support import StubLedger, serving
from hypothesis import given
from hypothesis import strategies as st
from page_support import changed
from prometheus_client.parser import text_string_to_metric_families

from exporter.cli import main
from exporter.cli.output import say
from exporter.config.resolve import EventFormatter
from exporter.cost.node_report import AgentLedger, read, write
from exporter.cost.queries import matches
from exporter.doctor.findings import Finding, Level, write_json, write_text
from exporter.metrics.collector import ExpositionOptions
from exporter.model.attribution import Owner, ShareMode
from exporter.model.ledger import Account, ByState, LedgerView, Totals
from exporter.model.snapshot import DeviceView
from exporter.service import responses
from exporter.web import node_api
from exporter.web.responses import Body, json_body
from exporter.web.server import Renderer

FORMULAS = ("=cmd|' /C calc'!A0", "+1+1", "-1", "@SUM(A1)", "\t=1", "\r=1")
SPLIT_FORMULAS = (
    "x;=cmd|' /C calc'!A0;",
    "x; @SUM(A1)",
    'x;"=1+1";',
    "x\n+1",
    "x\t-1",
    "x\r\n=1",
    " =1+1",
    "x;\uff1d1+1",
)
"""Formulas for spreadsheets that split at a semicolon or a tab, and ignore quotes within a cell."""
HOSTILE = (
    'a"} 1\nforged_metric{x="',
    "a\\",
    'a\\"',
    "<script>alert(1)</script>",
    "{{ 7 * 7 }}",
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m",
    "line\r\n2026-01-01T00:00:00Z INFO agent: forged",
    "\u2028\u2029\x85next",
    "\u202egnp.exe",
    *FORMULAS,
)
STEERING = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0x202E)}
ALIKE = ("team-a", "te\u0430m-a", "TEAM-A", "team-a\u200b", "team\u2010a", "team-a ", "te\u0301am", "t\u00e9am")


def report_of(names: tuple[str, ...]) -> AgentLedger:
    """Return a node's report, read from the agent's own document, with an hour of each of these namespaces."""
    dollar = ByState(unprofiled=0.5, idle=0.5)
    totals = Totals(seconds=ByState(unprofiled=1800.0, idle=1800.0), money={"USD": dollar})
    accounts = {
        Account(
            owner=Owner(namespace=name, kind=name, name=name, team=name), model=name, mode=ShareMode.EXCLUSIVE
        ): totals
        for name in names
    }
    ledger = LedgerView(ledgers=one_ledger(accounts, capacity_seconds=3600.0 * len(accounts)))
    shown = changed(snapshot(), metering={"ledger": ledger}, node=names[0])
    return read(json.loads(node_api.ledger_document(shown).plain), "http://node-a")


def written(report: AgentLedger, form: str) -> str:
    stream = io.StringIO()
    write(report, form, stream, "owner")
    return stream.getvalue()


def labels_of(page: str) -> list[Mapping[str, str]]:
    return [sample.labels for family in text_string_to_metric_families(page) for sample in family.samples]


def test_names_add_no_series_label_or_line() -> None:
    plain = exclusive()
    harmless, hostile = (page_of(name, plain) for name in ("harmless", None))
    assert "forged_metric" not in {line.partition("{")[0] for line in hostile.splitlines()}
    assert len(hostile.splitlines()) == len(harmless.splitlines())
    seen = {labels.get("pod_name") for labels in labels_of(hostile)}
    assert seen >= {HOSTILE[0]}


def page_of(name: str | None, view: DeviceView) -> str:
    """Return the page of metrics of a node with a single pod of a given name."""
    use = view.pods[0]
    holder = dataclasses.replace(
        use.holder, pod=name or HOSTILE[0], namespace=name or HOSTILE[1], container=name or "c"
    )
    shown = dataclasses.replace(view, pods=(dataclasses.replace(use, holder=holder),))
    return Renderer(ExpositionOptions(), list).metrics(snapshot(shown)).plain.decode()


def record(message: str, extra: str) -> logging.LogRecord:
    made_record = logging.makeLogRecord({"name": "exporter.x", "levelname": "INFO", "msg": "%s", "args": (message,)})
    made_record.pod = extra
    return made_record


@given(st.text() | st.sampled_from(HOSTILE), st.text() | st.sampled_from(HOSTILE))
def test_log_event_is_one_printable_line(message: str, extra: str) -> None:
    for formatter in (EventFormatter(as_json=False), EventFormatter(as_json=True)):
        line = formatter.format(record(message, extra))
        assert line.isprintable()
        assert not STEERING & set(line)
    if "://" not in message + extra:
        reported = json.loads(EventFormatter(as_json=True).format(record(message, extra)))
        assert (reported["message"], reported["pod"]) == (message, extra)


@pytest.mark.parametrize("as_json", [False, True])
def test_log_event_hides_user_and_password_of_an_address(*, as_json: bool) -> None:
    formatter = EventFormatter(as_json=as_json)
    line = formatter.format(record("cannot reach https://alice:secret@prometheus:9090/x", "http://alice:secret@agent"))
    assert "alice" not in line
    assert "secret" not in line
    assert "https://...@prometheus:9090/x" in line
    assert "http://...@agent" in line


@pytest.mark.parametrize("name", HOSTILE)
def test_a_message_of_a_command_is_one_printable_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(f"the server says {name}; fix it")
    said = capsys.readouterr().err
    assert said.startswith("gpu-cost-exporter: the server says ")
    assert said.endswith("; fix it\n")
    assert said[:-1].isprintable()


@pytest.mark.parametrize("name", HOSTILE)
def test_names_in_node_report_and_doctor_cannot_control_the_terminal(name: str) -> None:
    table = written(report_of((name, "fine")), "table")
    assert not (STEERING - {"\n"}) & set(table)
    stream = io.StringIO()
    finding = Finding(name="x", level=Level.WARN, cause=name, fix=f"see {name}")
    write_text([finding], simulated=False, stream=stream)
    write_json([finding], simulated=False, stream=stream)
    assert not (STEERING - {"\n"}) & set(stream.getvalue())


def test_names_in_node_csv_are_never_formulas() -> None:
    rows = list(csv.DictReader(io.StringIO(written(report_of(FORMULAS), "csv"))))
    assert len(rows) == len(FORMULAS)
    for row in rows:
        for key in ("node", "owner_namespace", "owner_kind", "owner_name", "team", "model"):
            assert row[key][0] in "'?", row


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_of_a_node_has_no_formula_at_any_separator(separator: str) -> None:
    cells = cells_of(written(report_of(SPLIT_FORMULAS), "csv"), separator)
    assert [cell for cell in cells if FORMULA_SIGN.match(cell)] == []


@pytest.mark.parametrize("separator", [",", ";", "\t"])
async def test_csv_of_a_fleet_has_no_formula_at_any_separator(separator: str, tmp_path: Path) -> None:
    lines = [({"team": name, "workload_namespace": name}, "3600") for name in SPLIT_FORMULAS]
    for form, more in (("csv", ("--by", "namespace,team")), ("focus", ())):
        file = tmp_path / form
        async with serving(StubLedger(lines=lines, money=[({**of, "currency": "USD"}, "1") for of, _ in lines])) as one:
            options = ("--window", "2026-10-01", "--format", form, "--output", str(file), *more)
            assert await asyncio.to_thread(main, ["report", "--prometheus", one.url, *options]) == 0
        text = file.read_text(encoding="utf-8")
        assert "cmd|" in text
        assert [cell for cell in cells_of(text, separator) if FORMULA_SIGN.match(cell)] == [], form


FORMULA_SIGN = re.compile(r"[\s\"]*[=+\-@\uff1d](?![0-9.]+\"?$)")
"""At the begin of a cell; a number with a sign does not match."""


def cells_of(text: str, separator: str) -> list[str]:
    """Return the cells of a spreadsheet with this list separator."""
    return [cell for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) for cell in row]


async def test_csv_on_a_terminal_has_no_control_character() -> None:
    hostile = "\x1b[31mred\x1b]0;owned\x07\x9b2J\u202e"
    stub = StubLedger(lines=[({"team": hostile}, "3600")], warnings=(f"slow {hostile}",))
    ours, theirs = pty.openpty()
    async with serving(stub) as one:
        command = ("report", "--prometheus", one.url, "--window", "2026-10-01", "--by", "team", "--format", "csv")
        command += ("--with-notes",)
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "exporter", *command, stdout=theirs)
        os.close(theirs)
        shown = await asyncio.to_thread(until_closed, ours)
        await process.wait()
    text = shown.replace("\r\n", "\n")
    assert "[31mred" in text
    assert "slow" in text
    assert (STEERING - {"\n"}) & set(text) == set()


def until_closed(descriptor: int) -> str:
    """Return all output on a terminal."""
    sent = b""
    with contextlib.suppress(OSError):
        while part := os.read(descriptor, 65_536):
            sent += part
    os.close(descriptor)
    return sent.decode(errors="replace")


def test_similar_names_stay_distinct() -> None:
    found = report_of(ALIKE).report("namespace").held
    assert {line.key.namespace for line in found} == set(ALIKE)
    assert {line.figures.seconds.total for line in found} == {3600.0}


@given(st.lists(st.text() | st.sampled_from(HOSTILE), max_size=3))
def test_values_stay_inside_the_quotes_of_a_query(values: list[str]) -> None:
    matcher = matches("team", values)
    inner = matcher.partition('"')[2]
    at = 0
    while inner[at] != '"':
        assert inner[at] != "\n"
        at += 2 if inner[at] == "\\" else 1
    assert at == len(inner) - 1, "the first unescaped quote is the last character"


async def test_html_report_has_a_sandbox_policy() -> None:
    answer = await responses.respond(make_mocked_request("GET", "/"), Body(b"<html>", responses.HTML))
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "script-src" not in policy
    assert policy.endswith("sandbox")
    other = await responses.respond(make_mocked_request("GET", "/"), json_body({}))
    assert isinstance(other, web.Response)
    assert "Content-Security-Policy" not in other.headers
