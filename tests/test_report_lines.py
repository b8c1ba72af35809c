"""A report's lines by owner, namespace, team or model: fewer of them, and the same sum."""

import csv
import io
import json

import pytest
from exposition_support import one_ledger, snapshot
from hypothesis import given
from hypothesis import strategies as st
from page_support import changed

from exporter.cli import main
from exporter.cost.node_report import BY, AgentLedger, By, read, write
from exporter.model.attribution import UNALLOCATED, UNATTRIBUTED, Owner, ShareMode
from exporter.model.ledger import Account, ByState, LedgerView, Totals
from exporter.web import node_api

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


def used(hours: float, dollars: float | None = None) -> Totals:
    money = {} if dollars is None else {"USD": ByState(unprofiled=dollars / 2, idle=dollars / 2)}
    return Totals(seconds=ByState(unprofiled=1800.0 * hours, idle=1800.0 * hours), money=money)


def account(owner: Owner, model: str = H100, mode: ShareMode = ShareMode.EXCLUSIVE) -> Account:
    return Account(owner=owner, model=model, mode=mode)


ACCOUNTS = {
    account(Owner(namespace="ml", kind="Job", name="a", team="core")): used(1, 2.0),
    account(Owner(namespace="ml", kind="Job", name="a", team="core"), A100, ShareMode.MIG): used(2, 3.0),
    account(Owner(namespace="ml", kind="Job", name="b", team="vision")): used(4, 4.0),
    account(Owner(namespace="lab", kind="Pod", name="c", team="core"), A100): used(8, 5.0),
    account(Owner(namespace="lab", kind="Notebook", name="d")): used(16),
    account(UNALLOCATED): used(32, 1.0),
    account(UNALLOCATED, A100): used(64, 100.0),
    account(UNATTRIBUTED, A100): used(128, 7.0),
}


def report_of(accounts: dict[Account, Totals]) -> AgentLedger:
    seconds = sum(totals.seconds.total for totals in accounts.values())
    ledger = LedgerView(ledgers=one_ledger(accounts, capacity_seconds=seconds))
    shown = changed(snapshot(), metering={"ledger": ledger})
    return read(json.loads(node_api.ledger_document(shown).plain), "http://node-a")


def written(by: By, form: str, accounts: dict[Account, Totals] = ACCOUNTS) -> str:
    stream = io.StringIO()
    write(report_of(accounts), form, stream, by)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("owner", ["lab/Pod/c", "ml/Job/b", "ml/Job/a", "ml/Job/a", "lab/Notebook/d"]),
        ("namespace", ["ml", "lab"]),
        ("team", ["core", "vision", "(no"]),
        ("model", ["A100-SXM4-80GB", "H100"]),
    ],
)
def test_table_has_one_line_per_key_and_special_owners_separately(by: By, names: list[str]) -> None:
    body = written(by, "table").partition("─\n")[2].partition("\nSum ")[0]
    first = [line.split()[0] for line in body.splitlines() if line]
    apart = ["A100-SXM4-80GB", "A100-SXM4-80GB", "H100"] if by == "model" else ["Unattributed", "Unallocated"]
    if by == "owner":
        apart.append("Unallocated")
    assert first[: len(names) + len(apart) + 1] == [*names, *apart, "Total"]


def test_sums_are_shown_in_every_format() -> None:
    table = written("team", "table")
    (core,) = [line.split() for line in table.splitlines() if line.startswith("core")]
    assert core == ["core", "11.00", "5.50", "5.50", "0.00", "50", "%", "10.00", "5.00"]
    ours = next(csv.DictReader(io.StringIO(written("team", "csv"))))
    assert (ours["team"], ours["owner_namespace"], ours["model"], ours["mode"]) == ("core", "", "", "")
    assert (float(ours["gpu_hours"]), float(ours["cost_USD"])) == (11.0, 10.0)
    document = json.loads(written("team", "json"))
    assert document["by"] == "team"
    line = document["lines"][0]
    assert (line["team"], line["owner_name"], line["model"], line["mode"]) == ("core", None, None, None)
    assert line["allocated_seconds"] == 11 * 3600


def test_label_lines_are_shown_in_every_format() -> None:
    accounts = {
        account(Owner(namespace="ml", kind="Job", name="a", cost_labels="project=llm,user=x")): used(1, 2.0),
        account(Owner(namespace="ml", kind="Job", name="b", cost_labels="project=llm,user=y")): used(2, 3.0),
        account(Owner(namespace="lab", kind="Pod", name="c", cost_labels="user=y")): used(4, 4.0),
        account(UNALLOCATED): used(8, 1.0),
    }
    table, text, document = (written("label:project", form, accounts) for form in ("table", "csv", "json"))
    shown = table.split("Total")[0].splitlines()[3:]
    assert [line.split()[0] for line in shown if line.strip(" ─")] == ["llm", "(no", "Unallocated"]
    assert [row["label:project"] for row in csv.DictReader(io.StringIO(text))] == ["llm", ""]
    lines_of = json.loads(document)["lines"]
    assert [(line["labels"], line["allocated_seconds"]) for line in lines_of[:2]] == [
        ({"project": "llm"}, 3 * 3600),
        (None, 4 * 3600),
    ]


def test_model_line_separates_owned_and_unallocated_hours() -> None:
    table = [line.split() for line in written("model", "table").splitlines()]
    assert ["A100-SXM4-80GB", "owners", "10.00"] in [line[:3] for line in table]
    assert ["A100-SXM4-80GB", "Unallocated", "64.00"] in [line[:3] for line in table]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("form", ["table", "json"])
def test_footer_is_the_same_for_every_grouping(by: By, form: str) -> None:
    if form == "table":
        whole, reported = (written(one, form).partition("Total")[2].split() for one in ("owner", by))
        assert reported == whole
    else:
        whole, reported = (json.loads(written(one, form)) for one in ("owner", by))
        assert {**reported, "by": 0, "lines": 0} == {**whole, "by": 0, "lines": 0}


OWNERS = st.sampled_from([UNALLOCATED, UNATTRIBUTED]) | st.builds(
    Owner,
    namespace=st.sampled_from(["", "a", "b"]),
    kind=st.just("Job"),
    name=st.sampled_from("xy"),
    team=st.sampled_from(["", "t"]),
)
SECONDS = st.floats(0, 1e9)


@given(
    st.dictionaries(
        st.builds(Account, owner=OWNERS, model=st.sampled_from([A100, H100]), mode=st.sampled_from(ShareMode)),
        st.builds(
            Totals,
            seconds=st.builds(ByState, unprofiled=SECONDS, idle=SECONDS, unknown=SECONDS),
            money=st.dictionaries(
                st.sampled_from(["USD", "EUR"]), st.builds(ByState, unprofiled=SECONDS, idle=SECONDS)
            ),
        ),
    ),
    st.sampled_from(tuple(BY)),
)
def test_lines_sum_to_the_total_and_are_unique(accounts: dict[Account, Totals], by: By) -> None:
    report = report_of(accounts).report(by)
    lines = (*report.held, *report.apart)
    assert len({line.key for line in lines}) == len(lines)
    total = sum(accounts.values(), start=Totals())
    assert report.total.seconds.total == pytest.approx(total.seconds.total, rel=1e-12)
    assert sum(line.figures.seconds.total for line in lines) == pytest.approx(total.seconds.total, rel=1e-12)
    assert report.total.money.keys() == total.money.keys()
    for currency, money in total.money.items():
        assert report.total.money[currency].total == pytest.approx(money.total, rel=1e-12)


def test_invalid_grouping_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--agent", "node-a", "--by", "pod"]) == 2
    assert "--by" in capsys.readouterr().err
