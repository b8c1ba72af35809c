"""The checker of FOCUS files: every rule has a file that breaks it, and no right file is blamed."""

import csv
import gzip
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from focus_support import as_csv, exported, held, key, ledger, nobody, with_cells
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.cli import main
from exporter.errors import ConfigError, ExporterError
from exporter.report.focus import Check, FocusSettings, check_focus
from exporter.report.focus.columns import OWN_COLUMNS, VERSIONS, columns_of
from exporter.report.focus.findings import MOST_TOLD, RULES

OURS, _ = exported(
    ledger(
        {
            key("a", team="vision"): held(10.0),
            key("b"): held(6.0),
            nobody(): held(8.0, active=0, idle=1),
            key("whole", node="node-w"): held(24.0),
        }
    )
)
"""Rows 0 to 2 are split, 2 is the remainder, row 3 is not split."""
_DETAILS = "AllocatedMethodDetails"


def check(text: str, version: str | None = None) -> Check:
    return check_focus(io.StringIO(text, newline=""), "bill.csv", version=version)


def rules(text: str, version: str | None = None) -> set[str]:
    return {finding.rule for finding in check(text, version).findings}


def column(text: str, name: str) -> list[str]:
    return [row[name] for row in csv.DictReader(io.StringIO(text))]


def without(text: str, *names: str) -> str:
    rows = list(csv.reader(io.StringIO(text)))
    keep = [index for index, name in enumerate(rows[0]) if name not in names]
    return as_csv([row[index] for index in keep] for row in rows)


def with_column(text: str, name: str, value: str, at: int = 0) -> str:
    rows = list(csv.reader(io.StringIO(text)))
    return as_csv([*row[:at], name if not number else value, *row[at:]] for number, row in enumerate(rows))


def renamed(text: str, old: str, new: str) -> str:
    header, rest = text.split("\n", 1)
    return ",".join(new if name == old else name for name in header.split(",")) + "\n" + rest


def details(ratio: str, more: str = "") -> str:
    return f'{{"Elements":[{{"AllocatedRatio":{ratio}{more}}}]}}'


FAULTY: list[tuple[str, str, str]] = [
    ("FILE-2", OURS + "a,b\n", "2 fields"),
    ("COL-1", without(OURS, "EffectiveCost"), "EffectiveCost"),
    ("COL-1", without(OURS, "HostProviderName"), "HostProviderName"),
    ("COL-2", with_column(OURS, "Team", "vision"), "no column of FOCUS"),
    ("COL-2", with_column(OURS, "PublisherName", "me"), "is not of 1.4"),
    ("COL-3", with_column(OURS, "ChargeClass", ""), "twice"),
    ("COL-4", with_column(OURS, "x_First", ""), "stands behind 'x_First'"),
    ("COL-5", renamed(OURS, "x_Team", "x_the-team"), "x_the-team"),
    ("COL-5", renamed(OURS, "x_Team", "x_" + "Team" * 13), "48 letters"),
    ("VAL-1", with_cells(OURS, [(0, "BillingAccountId", "")]), "BillingAccountId: null"),
    ("VAL-2", with_cells(OURS, [(0, "RegionName", "N/A")]), "'N/A'"),
    ("VAL-3", with_cells(OURS, [(0, "BilledCost", "1,000")]), "'1,000'"),
    ("VAL-3", with_cells(OURS, [(0, "BilledCost", "1e3")]), "'1e3'"),
    ("VAL-3", with_cells(OURS, [(0, "BilledCost", "+1")]), "'+1'"),
    ("VAL-4", with_cells(OURS, [(3, "ChargePeriodEnd", "2026-10-02")]), "'2026-10-02'"),
    ("VAL-4", with_cells(OURS, [(3, "ChargePeriodEnd", "2026-10-02T00:00:00+00:00")]), "+00:00"),
    ("VAL-4", with_cells(OURS, [(3, "ChargePeriodEnd", "2026-13-02T00:00:00Z")]), "2026-13"),
    ("VAL-5", with_cells(OURS, [(3, "ChargeCategory", "usage")]), "'usage'"),
    ("VAL-5", with_cells(OURS, [(3, "ServiceSubcategory", "GPUs")]), "'GPUs'"),
    ("VAL-6", with_cells(OURS, [(3, "BillingCurrency", "Dollar")]), "'Dollar'"),
    ("VAL-6", with_cells(OURS, [(3, "BillingCurrency", "usd")]), "'usd'"),
    ("VAL-7", with_cells(OURS, [(3, "Tags", "team=vision")]), "'team=vision'"),
    ("VAL-7", with_cells(OURS, [(3, "Tags", '{"team":["vision"]}')]), "vision"),
    ("VAL-8", with_cells(OURS, [(3, "PricingUnit", "gpu-hours")]), "'gpu-hours'"),
    ("VAL-8", with_cells(OURS, [(3, "ConsumedUnit", "GPU Hours/")]), "'GPU Hours/'"),
    ("VAL-9", with_cells(OURS, [(3, "ContractedUnitPrice", "-2.1")]), "'-2.1'"),
    ("VAL-9", with_cells(OURS, [(3, "x_ActiveRatio", "1.2")]), "'1.2'"),
    ("ROW-1", with_cells(OURS, [(3, "ChargePeriodEnd", "2026-10-01T00:00:00Z")]), "is not after"),
    ("ROW-2", with_cells(OURS, [(3, "ServiceCategory", "Storage")]), "'Containers' is not one of 'Storage'"),
    ("ROW-3", with_cells(OURS, [(3, "PricingQuantity", "")]), "null in a charge of category Usage"),
    ("ROW-3", with_cells(OURS, [(3, "ConsumedQuantity", "")]), "ConsumedQuantity"),
    ("ROW-3", with_cells(OURS, [(3, "ChargeCategory", "Tax")]), "a value in a charge of category Tax"),
    ("ROW-3", with_cells(OURS, [(3, "ChargeCategory", "Purchase")]), "not Usage-Based"),
    ("ROW-4", with_cells(OURS, [(3, "ResourceId", "")]), "a value where ResourceId is null"),
    ("ROW-4", with_cells(OURS, [(3, "PricingUnit", "")]), "null where PricingQuantity has a value"),
    ("ROW-5", with_cells(OURS, [(3, "ContractedCost", "51.4")]), "51.4 is not ContractedUnitPrice 2.1"),
    ("ROW-6", with_cells(OURS, [(3, "x_IdleCost", "16")]), "its parts sum to"),
    ("SPLIT-1", with_cells(OURS, [(3, "AllocatedResourceId", "a/b")]), "a value without a method"),
    ("SPLIT-2", with_cells(OURS, [(0, _DETAILS, "{}")]), "no Elements"),
    ("SPLIT-2", with_cells(OURS, [(0, _DETAILS, '{"Elements":[{}]}')]), "without a number"),
    ("SPLIT-2", with_cells(OURS, [(0, _DETAILS, details("0.4", ',"UsageQuantity":3'))]), "no UsageUnit"),
    ("SPLIT-2", with_cells(OURS, [(0, _DETAILS, details("1e-999999999"))]), "from 0 to 1"),
    ("SPLIT-2", with_cells(OURS, [(0, _DETAILS, details("41.6"))]), "from 0 to 1"),
    ("SPLIT-2", with_cells(OURS, [(0, _DETAILS, details("0.4", ',"Hours":3'))]), "the key 'Hours'"),
    ("SPLIT-3", with_cells(OURS, [(0, "AllocatedResourceName", "")]), "only one of id and name"),
    ("SPLIT-3", with_cells(OURS, [(2, "AllocatedTags", '{"gpu-cost-exporter/team":"x"}')]), "not allocated"),
    (
        "SPLIT-4",
        with_cells(OURS, [(0, "AllocatedTags", '{"gpu-cost-exporter/node":"node-a"}')]),
        "repeats 'gpu-cost-exporter/node'",
    ),
    ("SPLIT-5", with_cells(OURS, [(0, _DETAILS, details("0.4166666666"))]), "sum to 0.99999999"),
    ("SPLIT-6", with_cells(OURS, [(1, "ServiceName", "Other")]), "differs from line 2"),
    ("SPLIT-6", with_cells(OURS, [(1, "ContractedUnitPrice", "2.2")]), "differs from line 2"),
    ("SPLIT-6", with_cells(OURS, [(1, "AllocatedMethodId", "another")]), "differs from line 2"),
    ("SPLIT-7", with_cells(OURS, [(1, "EffectiveCost", "13")]), "13 at a ratio of"),
    (
        "SPLIT-8",
        with_cells(
            OURS,
            [
                (3, name, column(OURS, name)[0])
                for name in ("ResourceId", "ResourceName", "ChargeDescription", "Tags", "SkuPriceId")
            ],
        ),
        "money of an origin that line 2 splits",
    ),
]


@pytest.mark.parametrize(("rule", "text", "words"), FAULTY, ids=lambda value: value[:40] if len(value) < 60 else "file")
def test_a_planted_fault_is_found_and_told_with_its_rule(rule: str, text: str, words: str) -> None:
    found = check(text, "1.4").findings
    told = [finding.words for finding in found if finding.rule == rule]
    assert told, [finding.words for finding in found]
    assert any(words in line for line in told), told


def test_every_rule_has_a_file_that_breaks_it() -> None:
    # FILE-1 ends the check.
    assert {rule for rule, _, _ in FAULTY} | {"FILE-1"} == set(RULES)


def test_a_fault_is_told_with_its_line_its_column_and_what_is_allowed() -> None:
    (finding,) = check(with_cells(OURS, [(3, "BillingCurrency", "Dollar")])).findings
    assert finding.words == "line 5: BillingCurrency: 'Dollar'; allowed: an ISO 4217 code such as USD [VAL-6]"


@pytest.mark.parametrize("version", ["1.2", "1.3", "1.4"])
def test_our_own_files_are_right_and_their_version_is_seen(version: str) -> None:
    of = ledger({key("a"): held(10.0), nobody(): held(8.0)}, {key("a"): held(24.0)})
    text, _ = exported(of, version, FocusSettings(restated=True))
    found = check(text)
    assert (found.findings, found.version, found.rows, found.origins) == ((), version, 3, 1)


def test_a_zeroed_origin_row_may_stand_beside_its_parts() -> None:
    first = OURS.splitlines()[1]
    rows = list(csv.reader(io.StringIO(OURS)))
    origin = next(csv.reader([first]))
    for name, value in (
        *((name, "") for name in rows[0] if name.startswith("Allocated")),
        *((name, "0") for name in ("EffectiveCost", "ContractedCost", "ListCost", "PricingQuantity")),
        *((f"x_{name}Cost", "0") for name in ("Active", "Idle", "Unknown")),
    ):
        origin[rows[0].index(name)] = value
    assert not check(as_csv([*rows, origin])).findings


def test_rows_of_an_origin_may_stand_anywhere_in_the_file() -> None:
    header, *rows = OURS.splitlines()
    assert not check("\n".join([header, *rows[::-1]]) + "\n").findings


def test_the_splits_of_1_2_are_checked_in_their_own_columns() -> None:
    of = ledger({key("a"): held(10.0), nobody(): held(14.0)})
    text, _ = exported(of, "1.2")
    broken = with_cells(text, [(0, f"x_{_DETAILS}", details("0.5"))])
    assert "SPLIT-5" in rules(broken)
    assert "AllocatedMethodId" not in text.splitlines()[0].split(",")


def test_a_file_of_a_cloud_without_our_columns_is_checked_all_the_same() -> None:
    values = {
        "BillingPeriodStart": "2026-10-01T00:00:00Z",
        "BillingPeriodEnd": "2026-11-01T00:00:00Z",
        "ChargePeriodStart": "2026-10-01T00:00:00Z",
        "ChargePeriodEnd": "2026-10-01T01:00:00Z",
        "ChargeCategory": "Tax",
        "BillingCurrency": "EUR",
        "ServiceCategory": "Other",
    }
    names = [name for name, one in columns_of("1.2").items() if one.level == "mandatory"]
    row = [values.get(name, "1.5" if name.endswith("Cost") else "x") for name in names]
    blank = {"ChargeClass", "PricingQuantity", "PricingUnit"}
    row = ["" if name in blank else value for name, value in zip(names, row, strict=True)]
    assert not check(as_csv([names, row])).findings


def test_of_many_faults_of_one_kind_the_first_are_told_and_all_are_counted() -> None:
    header, first, *_ = OURS.splitlines()
    broken = with_cells(f"{header}\n{first}\n", [(0, "BillingCurrency", "Dollar")]).splitlines()[1]
    found = check("\n".join([header, *[broken] * 100]) + "\n")
    assert found.counts["VAL-6", "BillingCurrency"] == 100
    assert sum(finding.rule == "VAL-6" for finding in found.findings) == MOST_TOLD


@pytest.mark.parametrize(("text", "words"), [("", "empty"), ('a,"b\n', "not CSV"), ('a,"b"c\n', "not CSV")])
def test_what_is_no_csv_is_told_in_words(text: str, words: str) -> None:
    with pytest.raises(ExporterError, match=words):
        check(text)


def test_null_may_be_written_as_a_word_of_its_own() -> None:
    assert not check(with_cells(OURS, [(3, "InvoiceId", "NULL"), (3, "ChargeClass", "null")])).findings
    assert "VAL-1" in rules(with_cells(OURS, [(3, "BillingAccountId", "NULL")]))


def test_every_column_and_rule_is_in_the_documentation() -> None:
    text = (Path(__file__).parent.parent / "docs" / "focus.md").read_text()
    assert [name for name in OWN_COLUMNS if f"`{name}`" not in text] == []
    groups = {rule.split("-")[0] for rule in RULES}
    assert [group for group in groups if f"`{group}-1`" not in text] == []
    for version in VERSIONS:
        assert version in text


cells = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["NaN", "1e999999999", "-0", "{}", "[]", '{"Elements":[]}', '{"Elements":[1]}', "9" * 5000, "\x1b[2J"]
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(OURS.splitlines()[0].split(",")), cells), max_size=4))
def test_whatever_stands_in_a_file_is_told_in_one_short_line(changes: list[tuple[int, str, str]]) -> None:
    for finding in check(with_cells(OURS, changes), "1.4").findings:
        assert finding.words.isprintable()
        assert len(finding.words) < 400


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"allowed: 1\.2, 1\.3, 1\.4"):
        check(OURS, "1.0")


def test_the_command_tells_faults_and_exits_1_and_0_for_a_right_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = tmp_path / "right.csv.gz", tmp_path / "wrong.csv"
    right.write_bytes(gzip.compress(OURS.encode()))
    wrong.write_text(with_cells(OURS, [(3, "BillingCurrency", "Dollar")]))
    assert main(["focus", "check", str(right)]) == 0
    assert capsys.readouterr().out.endswith("FOCUS 1.4, 4 rows, 3 of them parts of 1 split charges: ok\n")
    assert main(["focus", "check", str(wrong), "--version", "1.4"]) == 1
    assert "line 5: BillingCurrency: 'Dollar'" in capsys.readouterr().out


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_the_command_reads_a_pipe_to_its_end(
    pack: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(pack(OURS.encode()),), daemon=True)
    writer.start()
    assert main(["focus", "check", str(pipe)]) == 0
    writer.join(10)
    assert capsys.readouterr().out.endswith("FOCUS 1.4, 4 rows, 3 of them parts of 1 split charges: ok\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), (b"\x1f\x8b\x08\x00damaged", "damaged gzip"), (b"A\xff,B\n", "not UTF-8")],
)
def test_the_command_says_why_a_file_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    path = tmp_path / "bill.csv"
    if content is not None:
        path.write_bytes(content)
    assert main(["focus", "check", str(path)]) == 1
    assert words in capsys.readouterr().err


def test_the_command_lists_the_columns_of_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["focus", "columns"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 65
    assert "ChargeClass                           mandatory    string    may be null: Correction" in out
    assert main(["focus", "columns", "--version", "1.2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 57
