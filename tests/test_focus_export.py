"""The FOCUS export: split charges, sums, and unpriced time, which is no charge."""

import io
import json
import math
import os
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from focus_support import DAY, FACTS, H100, START, Lines, assert_promises, exported, held, key, ledger, nobody
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.cli import main
from exporter.cost.dimensions import LineKey
from exporter.cost.focus import COLUMNS, OWN_COLUMNS, VERSIONS, FocusSettings, write_focus
from exporter.cost.ledger import Figures, FleetLedger
from exporter.model.ledger import ByState

GOLDEN = Path(__file__).parent / "golden"
ANOTHER_DAY: Lines = {
    key("trainer", node="node-b", team="vision"): held(190.0),
    nobody(node="node-b"): held(2.0, active=0, idle=1),
    key("cache", node="node-c", mode="shared", team="web"): held(6.0, 1.20),
    key("web", node="node-c", mode="shared"): held(6.0, 1.20, active=0, idle=0),
    nobody("Unattributed", node="node-c", mode="shared"): held(12.0, 1.20, active=0, idle=0),
}


def seven_slices() -> Lines:
    """Return one GPU for one hour at 2.10, in seven slices of which one is free."""
    lines = {key(f"slice-{number}", mode="mig", team="vision"): held(1 / 7) for number in range(6)}
    return {**lines, nobody(mode="mig"): held(1 / 7, active=0, idle=1)}


def ratios(rows: list[dict[str, str]]) -> list[Decimal]:
    details = [json.loads(row["AllocatedMethodDetails"], parse_float=Decimal, parse_int=Decimal) for row in rows]
    return [Decimal(element["AllocatedRatio"]) for detail in details for element in detail["Elements"]]


@pytest.mark.parametrize("version", ["1.2", "1.4"])
def test_export_of_a_small_fleet_matches_the_golden_file(version: str) -> None:
    text, _ = exported(ledger(seven_slices(), ANOTHER_DAY), version)
    golden = GOLDEN / f"focus_{version}.csv"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_metadata_of_a_small_fleet_match_the_golden_file() -> None:
    metadata = io.StringIO()
    lines = {**ANOTHER_DAY, key("old-card", node="node-d", model="NVIDIA T4"): held(24.0, None)}
    own = FocusSettings(created_seconds=START + 2 * DAY)
    write_focus(ledger(lines), io.StringIO(), settings=own, metadata_stream=metadata)
    document = json.loads(metadata.getvalue())
    document["Schema"]["DataGeneratorVersion"] = "0"
    text = json.dumps(document, indent=2) + "\n"
    golden = GOLDEN / "focus_metadata.json"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_seven_slices_of_a_2_10_gpu_hour_are_seven_rows_of_0_30() -> None:
    _, rows = exported(ledger(seven_slices()))
    assert [row["EffectiveCost"] for row in rows] == ["0.3"] * 7
    assert sum(ratios(rows)) == 1
    assert sum(Decimal(row["PricingQuantity"]) for row in rows) == 1
    assert rows[0]["ContractedUnitPrice"] == "2.1"
    assert {row["ResourceId"] for row in rows} == {f"prod/node-a/{H100}"}
    assert [row["AllocatedResourceId"] for row in rows[-2:]] == ["research/Deployment/slice-5", ""]
    assert rows[-1]["x_WorkloadKind"] == "Unallocated"
    assert rows[-1]["AllocatedMethodId"] == rows[0]["AllocatedMethodId"] == "gpu-seconds-held"
    assert {row["x_SplitConfidence"] for row in rows} == {"exact"}


def test_gpus_of_one_owner_all_day_are_one_unsplit_row() -> None:
    _, rows = exported(ledger({key("trainer", team="vision"): held(192.0)}))
    (row,) = rows
    assert row["AllocatedMethodId"] == row["AllocatedResourceId"] == row["AllocatedTags"] == ""
    assert row["EffectiveCost"] == row["ContractedCost"] == "403.2"
    assert row["BilledCost"] == "0.0"
    assert json.loads(row["Tags"])["gpu-cost-exporter/team"] == "vision"
    assert (row["x_Namespace"], row["x_Workload"], row["x_Team"]) == ("research", "trainer", "vision")


def test_active_cost_is_divided_only_for_profiled_lines() -> None:
    lines = {key("a"): held(7.0, active=0.9, profiled=(0.1, 0.6), idle=0.05), key("b"): held(5.0, active=0.9)}
    _, (profiled, other) = exported(ledger(lines))
    parts = [Decimal(profiled[f"x_Active{name}Cost"]) for name in ("Effective", "Ineffective", "Unprofiled")]
    assert sum(parts) == Decimal(profiled["x_ActiveCost"])
    rest = [Decimal(profiled[f"x_{name}Cost"]) for name in ("Active", "Idle", "Unknown")]
    assert sum(rest) == Decimal(profiled["EffectiveCost"])
    assert (profiled["x_EffectiveRatio"], profiled["x_ProfiledRatio"]) == ("0.142857", "0.777778")
    names = ("x_ActiveEffectiveCost", "x_ActiveIneffectiveCost", "x_EffectiveRatio", "x_ProfiledRatio")
    assert [other[name] for name in names] == ["", "", "", "0.0"]
    assert other["x_ActiveUnprofiledCost"] == other["x_ActiveCost"]


@pytest.mark.parametrize("version", VERSIONS)
def test_labels_are_tags_under_their_keys_and_split_a_workload(version: str) -> None:
    hostile = "gpu-cost-exporter/node=x,project=ads"
    of = ledger({key("a", labels="project=llm"): held(10.0), key("a", labels=hostile): held(14.0), nobody(): held(1.0)})
    text, rows = exported(of, version)
    column = "AllocatedTags" if "AllocatedTags" in rows[0] else "x_AllocatedTags"
    tags = [json.loads(row[column] or "{}") for row in rows]
    assert [one.get("project") for one in tags] == ["ads", "llm", None]
    assert not any("gpu-cost-exporter/node" in one for one in tags)
    assert_promises(text, version)
    _, (whole,) = exported(ledger({key("a", labels="example.com/cost-center=42"): held(192.0)}), version)
    assert json.loads(whole["Tags"])["example.com/cost-center"] == "42"


def test_replicas_of_a_shared_gpu_are_marked_as_estimated() -> None:
    lines = {key("a", mode="shared"): held(12.0), key("b", mode="shared"): held(12.0)}
    _, rows = exported(ledger(lines))
    assert {(row["x_SharingMode"], row["x_SplitConfidence"]) for row in rows} == {("shared", "estimated")}
    assert ratios(rows) == [Decimal("0.5"), Decimal("0.5")]


def test_unallocated_and_unattributed_are_two_remainders_of_one_origin() -> None:
    lines = {key("a"): held(10.0), nobody(): held(8.0), nobody("Unattributed"): held(6.0)}
    _, rows = exported(ledger(lines))
    assert [row["x_WorkloadKind"] for row in rows] == ["Deployment", "Unattributed", "Unallocated"]
    assert [row["AllocatedResourceId"] == "" for row in rows] == [False, True, True]
    assert all(row["AllocatedMethodId"] for row in rows)
    assert sum(ratios(rows)) == 1


def test_unallocated_node_is_one_unsplit_row() -> None:
    _, (row,) = exported(ledger({nobody(): held(192.0, active=0, idle=1)}))
    assert row["AllocatedMethodId"] == ""
    assert row["x_WorkloadKind"] == "Unallocated"


def test_each_day_is_its_own_charge_in_its_month() -> None:
    days = [{key("trainer"): held(24.0)}] * 3
    _, rows = exported(ledger(*days, start=START + 60 * DAY))  # the last day of November, then two of December
    assert [row["ChargePeriodStart"] for row in rows] == [
        "2026-11-30T00:00:00Z",
        "2026-12-01T00:00:00Z",
        "2026-12-02T00:00:00Z",
    ]
    assert [row["BillingPeriodStart"][:7] for row in rows] == ["2026-11", "2026-12", "2026-12"]
    assert [row["BillingPeriodEnd"][:7] for row in rows] == ["2026-12", "2027-01", "2027-01"]
    assert rows[0]["ChargePeriodEnd"] == rows[1]["ChargePeriodStart"]


def test_unpriced_hours_are_no_charge_and_are_reported() -> None:
    lines = {key("a"): held(24.0), key("b", node="node-x"): held(24.0, None), key("c"): held(10.0, unpriced_hours=4.0)}
    stream, metadata = io.StringIO(), io.StringIO()
    write_focus(ledger(lines), stream, metadata_stream=metadata)
    assert "node-x" not in stream.getvalue()
    _, rows = exported(ledger(lines))
    partly = next(row for row in rows if row["x_Workload"] == "c")
    assert (partly["ConsumedQuantity"], partly["PricingQuantity"], partly["x_UnpricedGpuHours"]) == (
        "10.0",
        "6.0",
        "4.0",
    )
    document = json.loads(metadata.getvalue())
    assert document["x_Unpriced"] == [{"Cluster": "prod", "Node": "node-x", "Model": H100, "GpuHours": 24.0}]
    assert document["x_Conservation"]["MeteredGpuHours"] == 58


def test_cost_and_energy_without_seconds_are_charged_and_not_unpriced() -> None:
    """Processes without a pod on held GPUs: their energy is metered, the time belongs to the pods."""
    lines = {
        key("a"): held(24.0),
        nobody("Unattributed"): Figures(energy_joules=3.6e6, money={"USD": ByState(unprofiled=0.12)}),
        nobody("Unattributed", node="unmetered"): Figures(energy_joules=3.6e6),
    }
    stream, metadata = io.StringIO(), io.StringIO()
    write_focus(ledger(lines), stream, metadata_stream=metadata)
    document = json.loads(metadata.getvalue())
    assert document["x_Conservation"]["EffectiveCost"] == {"USD": "50.52"}
    assert document["x_Unpriced"] == []
    assert_promises(stream.getvalue(), "1.4")


def test_owner_with_higher_prices_gets_the_larger_part_of_the_cost() -> None:
    lines = {key("morning"): held(12.0, 2.0), key("afternoon"): held(12.0, 4.0)}
    _, rows = exported(ledger(lines))
    by_owner = {row["x_Workload"]: row for row in rows}
    assert (by_owner["morning"]["EffectiveCost"], by_owner["afternoon"]["EffectiveCost"]) == ("24.0", "48.0")
    assert by_owner["morning"]["ContractedUnitPrice"] == by_owner["afternoon"]["ContractedUnitPrice"] == "3.0"
    assert by_owner["morning"]["ContractedCost"] == "36.0"
    parts = dict(zip(by_owner, ratios(rows), strict=True))
    assert float(parts["morning"]) == pytest.approx(1 / 3)
    assert sum(parts.values()) == 1


def test_every_number_has_a_decimal_point() -> None:
    _, rows = exported(
        ledger({key("a"): Figures(seconds=ByState(unprofiled=3600), money={"USD": ByState(unprofiled=2.0)})})
    )
    kinds = {column.name: column.kind for column in COLUMNS} | OWN_COLUMNS
    numbers = [row[name] for row in rows for name in row if kinds[name] in {"decimal", "price"} and row[name]]
    assert numbers
    assert all("." in number for number in numbers)


def test_two_currencies_are_two_charges_and_hours_count_once() -> None:
    two = Figures(seconds=ByState(effective=7200), money={"USD": ByState(effective=2.0), "EUR": ByState(effective=1.0)})
    _, rows = exported(ledger({key("a"): two}))
    assert [(row["BillingCurrency"], row["EffectiveCost"], row["ConsumedQuantity"]) for row in rows] == [
        ("EUR", "1.0", "2.0"),
        ("USD", "2.0", "0.0"),
    ]
    assert [row["x_ActiveEffectiveCost"] for row in rows] == ["1.0", "2.0"]


@pytest.mark.parametrize(("capacity_type", "pricing"), [("on-demand", "Standard"), ("spot", "Dynamic")])
def test_spot_nodes_have_dynamic_pricing_and_the_region_is_exported(capacity_type: str, pricing: str) -> None:
    of = ledger({key("a"): held(24.0)}, facts=replace(FACTS, capacity_type=capacity_type))
    _, (row,) = exported(of)
    assert (row["PricingCategory"], row["RegionId"], row["x_CapacityType"]) == (pricing, "us-east-1", capacity_type)
    assert row["SkuPriceId"] == f"{H100}/p5.48xlarge/{capacity_type}/us-east-1"


def test_formula_like_names_are_text_and_quotes_and_newlines_survive() -> None:
    hostile = '=HYPERLINK("http://x","y")\n'
    _, (row,) = exported(ledger({key("w", team=hostile, namespace='+1|"; DROP'): held(24.0)}))
    assert row["x_Team"] == f"'{hostile}"
    assert row["x_Namespace"] == "'+1|\"; DROP"
    assert json.loads(row["Tags"])["gpu-cost-exporter/team"] == hostile


@pytest.mark.parametrize("version", VERSIONS)
def test_names_such_as_null_and_na_are_kept(version: str) -> None:
    """Kubernetes accepts each of them as a namespace or a workload, and a team may have the name NA."""
    words = ("null", "NULL", "none", "None", "nan", "n/a", "NA")
    lines = dict[LineKey, Figures]()
    for number, word in enumerate(words):
        place = {"cluster": word, "node": f"{word}-{number}"}
        lines[key(word, namespace="ml", team=word, **place)] = held(8.0)
        lines[key("w", namespace=word, **place)] = held(8.0)
        # As without the API: the namespace is the owner.
        lines[key("w", namespace=word, kind="", **place)._replace(workload="")] = held(8.0)
        lines[key("sole", namespace=word, team=word, cluster=word, node=word)] = held(24.0)
    text, rows = exported(ledger(lines), version)
    assert_promises(text, version)
    split = [row for row in rows if row["x_Workload"] != "sole"]
    prefix = "x_" if version == "1.2" else ""
    reported = {(row[f"{prefix}AllocatedResourceId"], row[f"{prefix}AllocatedResourceName"]) for row in split}
    assert {("ml/Deployment/null", "ml/Deployment/null"), ("'null", "'null"), ("none", "none")} <= reported
    assert len(reported) == len(split) == 3 * len(words)
    assert {row["x_Team"] for row in rows} == {"", "'null", "'NULL", *words[2:]}


def test_simulated_fleet_is_marked_on_every_row() -> None:
    of = ledger({key("a"): held(1.0)})
    simulated = FleetLedger(
        window=of.window, dimensions=of.dimensions, chunks=of.chunks, nodes=of.nodes, simulated=True
    )
    _, (row,) = exported(simulated)
    assert row["x_Simulated"] == "true"


@pytest.mark.parametrize("version", VERSIONS)
def test_restated_month_is_a_correction(version: str) -> None:
    days = ({key("a"): held(10.0), nobody(): held(8.0)}, {key("a"): held(24.0)})
    text, rows = exported(ledger(*days), version, FocusSettings(restated=True))
    assert_promises(text, version)
    assert [row["ChargeClass"] for row in rows] == ["Correction"] * 3


amounts = st.one_of(
    st.floats(min_value=1e-9, max_value=1e-6),
    st.floats(min_value=1e-6, max_value=1e6, allow_nan=False),
)
parts = st.floats(min_value=0.0, max_value=0.5)


@st.composite
def a_day(draw: st.DrawFn) -> Lines:
    lines: dict = {}
    for node in draw(st.lists(st.sampled_from(["n1", "n2"]), unique=True, min_size=1)):
        for number in range(draw(st.integers(0, 9))):
            mode = draw(st.sampled_from(["exclusive", "mig", "shared"]))
            price = draw(st.one_of(st.none(), st.just(0.0), st.floats(1e-4, 50.0)))
            figures = held(draw(amounts), price, active=draw(parts), idle=draw(parts))
            lines[key(f"w{number}", node=node, mode=mode)] = figures
        if draw(st.booleans()):
            lines[nobody(node=node)] = held(draw(amounts), 2.0, active=0, idle=1)
    return lines


@settings(max_examples=150, deadline=None)
@given(st.lists(a_day(), min_size=1, max_size=2))
def test_every_origin_sums_to_its_cost_and_its_ratios_to_one(days: list[Lines]) -> None:
    of = ledger(*days)
    text, rows = exported(of)
    origins: dict = {}
    for row in rows:
        place = (row["ChargePeriodStart"], row["ResourceId"], row["BillingCurrency"])
        origins.setdefault(place, []).append(row)
        own = sum(Decimal(row[f"x_{kind}Cost"]) for kind in ("Active", "Idle", "Unknown"))
        assert own == Decimal(row["EffectiveCost"])
        assert all(Decimal(row[f"x_{kind}Cost"]) >= 0 for kind in ("Active", "Idle", "Unknown"))
        assert Decimal(row["EffectiveCost"]) >= 0
    for same in origins.values():
        if len(same) > 1:
            assert sum(ratios(same)) == 1
            assert all(ratio >= 0 for ratio in ratios(same))
    expected = math.fsum(
        figures.money["USD"].total for lines in days for figures in lines.values() if "USD" in figures.money
    )
    total = sum((Decimal(row["EffectiveCost"]) for row in rows), Decimal(0))
    assert float(total) == pytest.approx(expected, rel=1e-12, abs=1e-9)
    for version in VERSIONS:
        text, _ = exported(of, version)
        assert_promises(text, version)


def test_line_break_in_a_name_does_not_end_the_row() -> None:
    text, rows = exported(ledger({key("a\rb"): held(10.0), key("\nc"): held(10.0)}))
    assert_promises(text, "1.4")
    assert {row["x_Workload"] for row in rows} == {"a\nb", "'\nc"}


def test_lone_surrogate_in_a_name_is_replaced() -> None:
    stream, metadata = io.StringIO(), io.StringIO()
    of = replace(ledger({key("a\ud800b"): held(10.0)}), notes=("\udfff",))
    write_focus(of, stream, metadata_stream=metadata)
    assert "a?b" in stream.getvalue().encode().decode(), "a lone surrogate could not be written"
    assert json.loads(metadata.getvalue().encode())["x_Notes"] == ["?"]


def test_every_own_column_and_version_is_documented() -> None:
    text = (Path(__file__).parent.parent / "docs" / "focus.md").read_text()
    assert [name for name in OWN_COLUMNS if f"`{name}`" not in text] == []
    assert [version for version in VERSIONS if version not in text] == []


def test_command_lists_the_columns_of_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["focus", "columns"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 65
    assert "ChargeClass                           mandatory    string    may be null: Correction" in out
    assert main(["focus", "columns", "--version", "1.2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 57
