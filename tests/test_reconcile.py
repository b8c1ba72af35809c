"""A bill beside the ledger: hand-made bills with known gaps, of which every cent is explained."""

import gzip
import io
import json
import os
from collections.abc import Mapping as Map
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from fleet_support import FleetServer
from focus_support import DAY, FACTS, START, Lines, as_csv, exported, held, key, ledger, nobody
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.cli import main
from exporter.errors import ConfigError, ExporterError
from exporter.model import NodeFacts
from exporter.report.fleet.values import Failure, FleetLedger, Window
from exporter.report.reconcile import (
    Bill,
    Group,
    Mapping,
    Reconciliation,
    read_bill,
    read_mapping,
    reconcile,
    write_reconciliation,
)

GOLDEN = Path(__file__).parent / "golden"
P5 = "p5.48xlarge"
Cells = Map[str, str]
FOCUS_LINE: Cells = {
    "BillingAccountId": "payer",
    "SubAccountId": "111122223333",
    "BillingCurrency": "USD",
    "ChargeCategory": "Usage",
    "ChargePeriodStart": "2026-10-01T00:00:00Z",
    "ChargePeriodEnd": "2026-10-02T00:00:00Z",
    "ConsumedQuantity": "24",
    "ConsumedUnit": "Hours",
    "ListCost": "480",
    "ContractedCost": "480",
    "EffectiveCost": "480",
    "BilledCost": "480",
    "ResourceId": "i-1",
    "RegionId": "us-east-1",
    "SkuPriceDetails": '{"InstanceType":"p5.48xlarge","GpuCount":8}',
    "CommitmentDiscountStatus": "",
    "ChargeDescription": "time",
}
CUR_LINE: Cells = {
    "lineItem/LineItemType": "Usage",
    "lineItem/UsageStartDate": "2026-10-01T00:00:00Z",
    "lineItem/UsageEndDate": "2026-10-01T01:00:00Z",
    "lineItem/UsageAccountId": "111122223333",
    "lineItem/UsageType": "BoxUsage:p5.48xlarge",
    "lineItem/ResourceId": "i-1",
    "lineItem/UsageAmount": "1",
    "lineItem/UnblendedCost": "20",
    "lineItem/CurrencyCode": "USD",
    "lineItem/LineItemDescription": "",
    "pricing/publicOnDemandCost": "20",
    "product/instanceType": P5,
    "product/regionCode": "us-east-1",
    "product/gpu": "8",
    "reservation/EffectiveCost": "",
    "reservation/ReservationARN": "",
    "reservation/UnusedAmortizedUpfrontFeeForBillingPeriod": "",
    "reservation/UnusedRecurringFee": "",
    "savingsPlan/SavingsPlanEffectiveCost": "",
    "savingsPlan/TotalCommitmentToDate": "",
    "savingsPlan/UsedCommitment": "",
}


def bill_file(folder: Path, line: Cells, *changes: Cells, name: str = "bill.csv") -> Path:
    """A bill with one line per change of the line."""
    path = folder / name
    path.write_text(as_csv([line, *[{**line, **change}.values() for change in changes]]))
    return path


def whole_node(per_hour: float | None = 2.5, hours: float = 192.0) -> Lines:
    """Eight GPUs over a day."""
    return {key("a"): held(hours / 2, per_hour), nobody(): held(hours / 2, per_hour, active=0, idle=1)}


def compared(
    path: Path, of: FleetLedger, mapping: Mapping | None = None, *, gpu_part: float = 1.0
) -> tuple[Reconciliation, Bill]:
    told = mapping or Mapping()
    bill = read_bill([path], of.window, told, {facts.instance_type for facts in of.nodes.values()})
    found = reconcile(of, bill, told, gpu_part=gpu_part)
    for group in found.groups:
        if not group.note:
            assert sum((one.amount for one in group.explanations), Decimal(0)) == group.gap
    return found, bill


def only(found: Reconciliation) -> Group:
    (group,) = found.groups
    return group


def amounts(group: Group) -> dict[str, str]:
    return {one.kind: f"{one.amount}" for one in group.explanations if one.amount}


def test_a_bill_at_our_price_for_our_hours_has_no_gap(tmp_path: Path) -> None:
    found, _ = compared(bill_file(tmp_path, FOCUS_LINE, {}), ledger(whole_node()))
    group = only(found)
    assert (group.billed, group.metered, group.gap) == (Decimal("480.00"), Decimal("480.00"), 0)
    assert amounts(group) == {}
    assert (group.billed_gpu_hours, group.metered_gpu_hours) == (192, 192)


def test_a_price_book_at_list_is_apart_from_negotiated_prices_and_commitments(tmp_path: Path) -> None:
    path = bill_file(tmp_path, FOCUS_LINE, {"ContractedCost": "432", "EffectiveCost": "300", "BilledCost": "0"})
    group = only(compared(path, ledger(whole_node()))[0])
    assert amounts(group) == {"negotiated": "-48.00", "commitments": "-132.00"}
    assert group.invoiced == 0


def test_a_price_book_that_is_too_low_is_told_with_both_rates(tmp_path: Path) -> None:
    group = only(compared(bill_file(tmp_path, FOCUS_LINE, {}), ledger(whole_node(2.0)))[0])
    assert amounts(group) == {"price_book": "96.00"}
    assert "2.0000" in group.explanations[0].words
    assert "2.5000" in group.explanations[0].words


def test_the_part_of_a_node_that_is_no_gpu_is_told(tmp_path: Path) -> None:
    of = ledger(whole_node(2.375))
    group = only(compared(bill_file(tmp_path, FOCUS_LINE, {}), of, gpu_part=0.95)[0])
    assert amounts(group) == {"not_gpu": "24.00"}


def test_hours_without_an_agent_are_told_apart_from_hours_without_a_recorded_ledger(tmp_path: Path) -> None:
    second = {"ResourceId": "i-2"}
    of = ledger(whole_node(hours=96.0))  # twelve hours of one of two nodes
    of = replace(of, chunks=tuple(replace(chunk, recorded_hours={"prod": 12}) for chunk in of.chunks))
    found, _ = compared(bill_file(tmp_path, FOCUS_LINE, {}, second), of)
    group = only(found)
    assert group.gap == Decimal("720.00")
    assert amounts(group) == {"not_recorded": "480.00", "not_metered": "240.00"}
    assert (found.recorded_hours, found.expected_hours) == (12, 24)


def test_days_are_compared_one_by_one_so_that_too_many_hours_do_not_hide_too_few(tmp_path: Path) -> None:
    tomorrow = {"ChargePeriodStart": "2026-10-02T00:00:00Z", "ChargePeriodEnd": "2026-10-03T00:00:00Z"}
    path = bill_file(tmp_path, FOCUS_LINE, {}, {**tomorrow, "ConsumedQuantity": "12", "EffectiveCost": "240"})
    of = ledger(whole_node(hours=96.0), whole_node())
    hours = {one.kind: one.gpu_hours for one in only(compared(path, of)[0]).explanations}
    assert (hours["not_metered"], hours["not_billed"]) == (96, 96)


def test_hours_without_a_price_of_ours_are_told_at_the_bills_rate(tmp_path: Path) -> None:
    of = ledger({key("a"): held(96.0, 2.5), nobody(): held(96.0, None)})
    group = only(compared(bill_file(tmp_path, FOCUS_LINE, {}), of)[0])
    assert amounts(group) == {"unpriced": "240.00"}


def test_taxes_credits_transfer_and_unused_commitments_are_lines_of_their_own(tmp_path: Path) -> None:
    none = {"ConsumedQuantity": "", "ConsumedUnit": "", "SkuPriceDetails": ""}
    path = bill_file(
        tmp_path,
        FOCUS_LINE,
        {**none, "ChargeCategory": "Tax", "EffectiveCost": "10.01"},  # before it is known what i-1 is
        {},
        {**none, "ChargeCategory": "Credit", "EffectiveCost": "-5"},
        {**none, "EffectiveCost": "3.333", "ConsumedUnit": "GB", "ConsumedQuantity": "9"},
        {"CommitmentDiscountStatus": "Unused", "EffectiveCost": "100", "ResourceId": ""},
        {**none, "ResourceId": "bucket", "EffectiveCost": "77"},
    )
    found, bill = compared(path, ledger(whole_node()))
    group = only(found)
    assert amounts(group) == {"unused": "100.00", "tax": "10.01", "credit": "-5.00", "other": "3.33"}
    assert group.gap == Decimal("108.34")
    assert (bill.scope.gpu_lines, bill.scope.other_lines, bill.scope.other_cost) == (5, 1, {"USD": Decimal(77)})


def test_money_in_another_currency_is_told_and_never_converted(tmp_path: Path) -> None:
    found, _ = compared(bill_file(tmp_path, FOCUS_LINE, {"BillingCurrency": "EUR"}), ledger(whole_node()))
    assert {group.currency for group in found.groups} == {"EUR", "USD"}
    assert all("the bill is in EUR, the ledger in USD" in group.note for group in found.groups)
    assert found.total("USD") == (0, 0, 0)
    assert found.currencies == (), "a total of nothing would say that there was nothing"


def test_instances_that_only_one_side_has_are_their_whole_gap(tmp_path: Path) -> None:
    path = bill_file(tmp_path, FOCUS_LINE, {"SkuPriceDetails": '{"InstanceType":"g5.xlarge","GpuCount":1}'})
    found, _ = compared(path, ledger(whole_node()))
    by_type = {group.instance_type: amounts(group) for group in found.groups}
    assert by_type == {"g5.xlarge": {"not_metered": "480.00"}, P5: {"not_billed": "-480.00"}}


def test_lines_of_other_times_and_accounts_are_left_out_and_counted(tmp_path: Path) -> None:
    path = bill_file(
        tmp_path,
        FOCUS_LINE,
        {},
        {"ChargePeriodStart": "2026-09-30T00:00:00Z"},
        {"SubAccountId": "999900001111"},
    )
    found, bill = compared(path, ledger(whole_node()), Mapping(accounts=frozenset(("111122223333",))))
    assert only(found).gap == 0
    assert (bill.scope.outside_window, bill.scope.other_accounts, bill.scope.lines) == (1, 1, 3)


def test_malformed_lines_are_told_with_their_numbers_and_never_skipped_silently(tmp_path: Path) -> None:
    path = bill_file(
        tmp_path,
        FOCUS_LINE,
        {"EffectiveCost": "lots"},
        {},
        {"ChargePeriodStart": "yesterday"},
        {"BilledCost": "NaN"},
        {"BillingCurrency": ""},
        {"EffectiveCost": ""},
    )
    with path.open("a") as file:
        file.write("too,few\n")
    found, bill = compared(path, ledger(whole_node()))
    assert [(one.line, one.what) for one in bill.malformed] == [
        (2, "EffectiveCost: 'lots' is no number"),
        (4, "ChargePeriodStart: 'yesterday' is no time"),
        (5, "BilledCost: 'NaN' is no number"),
        (6, "BillingCurrency: is empty"),
        (7, "EffectiveCost: is empty"),
        (8, "another number of fields than the header"),
    ]
    assert bill.scope.malformed == 6
    assert only(found).gap == 0


def test_an_old_report_of_aws_is_amortised_line_type_by_line_type(tmp_path: Path) -> None:
    blank = {"lineItem/UsageType": "", "product/instanceType": "", "lineItem/ResourceId": "", "product/gpu": ""}
    path = bill_file(
        tmp_path,
        CUR_LINE,
        {"lineItem/UsageAmount": "6", "lineItem/UnblendedCost": "120", "pricing/publicOnDemandCost": "120"},
        {
            "lineItem/LineItemType": "SavingsPlanCoveredUsage",
            "lineItem/UsageAmount": "6",
            "lineItem/UnblendedCost": "120",
            "pricing/publicOnDemandCost": "120",
            "savingsPlan/SavingsPlanEffectiveCost": "90",
        },
        {"lineItem/LineItemType": "SavingsPlanNegation", "lineItem/UnblendedCost": "-120"},
        {
            "lineItem/LineItemType": "DiscountedUsage",
            "lineItem/UsageAmount": "12",
            "lineItem/UnblendedCost": "0",
            "pricing/publicOnDemandCost": "240",
            "reservation/EffectiveCost": "150",
        },
        {
            "lineItem/LineItemType": "RIFee",
            "lineItem/UnblendedCost": "500",
            "reservation/UnusedAmortizedUpfrontFeeForBillingPeriod": "7",
            "reservation/UnusedRecurringFee": "5",
        },
        {"lineItem/LineItemType": "Fee", "lineItem/UnblendedCost": "9000", "reservation/ReservationARN": "arn:x"},
        {**blank, "lineItem/LineItemType": "Tax", "lineItem/UnblendedCost": "44"},
        {
            "lineItem/UsageType": "USE1-DataTransfer-Out-Bytes",
            "lineItem/UnblendedCost": "2",
            "product/instanceType": "",
        },
        {"lineItem/UsageType": "UnusedBox:p5.48xlarge", "lineItem/UnblendedCost": "20"},
    )
    found, bill = compared(path, ledger(whole_node()))
    group = only(found)
    # 120 + 90 + 150 of use, 12 and 20 unused, 2 of transfer.
    assert group.billed == Decimal("394.00")
    assert amounts(group) == {"commitments": "-120.00", "unused": "32.00", "other": "2.00"}
    assert bill.scope.other_cost == {"USD": Decimal(44)}
    assert group.billed_gpu_hours == 192


def test_a_bill_may_write_null_as_a_word(tmp_path: Path) -> None:
    path = bill_file(tmp_path, FOCUS_LINE, {"ContractedCost": "NULL", "ListCost": "null", "SubAccountId": "NULL"})
    assert only(compared(path, ledger(whole_node()))[0]).gap == 0


def test_the_new_form_of_that_report_says_the_same(tmp_path: Path) -> None:
    new = {
        "line_item_line_item_type": "Usage",
        "line_item_usage_start_date": "2026-10-01 00:00:00.000",
        "line_item_usage_end_date": "2026-10-02 00:00:00.000",
        "line_item_usage_type": "BoxUsage:p5.48xlarge",
        "line_item_usage_amount": "24.0",
        "line_item_unblended_cost": "4.8E2",
        "line_item_currency_code": "USD",
        "line_item_resource_id": "i-1",
        "product": '{"gpu":"8","instance_type":"p5.48xlarge","region":"us-east-1"}',
    }
    path = tmp_path / "cur2.csv.gz"
    path.write_bytes(gzip.compress(as_csv([new, new.values()]).encode()))
    assert only(compared(path, ledger(whole_node()))[0]).gap == 0


@pytest.mark.parametrize(
    "name",
    ["p6-b200.48xlarge", "g6e.12xlarge", "Standard_ND96isr_H100_v5", "a3-highgpu-8g", "ml.p4d.24xlarge", "our.special"],
)
def test_instances_with_gpus_are_known_by_their_types_and_ours_by_our_nodes(tmp_path: Path, name: str) -> None:
    path = bill_file(tmp_path, FOCUS_LINE, {"SkuPriceDetails": json.dumps({"InstanceType": name, "GpuCount": 8})})
    of = ledger(whole_node(), facts=replace(FACTS, instance_type=name))
    assert only(compared(path, of)[0]).gap == 0


@pytest.mark.parametrize("name", ["m5.xlarge", "c7g.metal", "g4ad.xlarge", "Standard_D4s_v5", "n2-standard-8"])
def test_instances_without_gpus_of_ours_are_left_out_and_counted(tmp_path: Path, name: str) -> None:
    path = bill_file(tmp_path, FOCUS_LINE, {"SkuPriceDetails": json.dumps({"InstanceType": name})})
    found, bill = compared(path, ledger(whole_node()))
    assert bill.scope.other_lines == 1
    assert only(found).instance_type == P5


def test_a_map_ties_resources_to_nodes_without_labels(tmp_path: Path) -> None:
    file = tmp_path / "map.csv"
    file.write_text("cluster,node,resource,instance_type,account,gpus\nprod,node-a,i-1,,,\n,,,p5.48xlarge,,8\n")
    mapping = read_mapping(file)
    path = bill_file(tmp_path, FOCUS_LINE, {"SkuPriceDetails": '{"InstanceType":"p5.48xlarge"}'})
    of = ledger(whole_node(), facts=NodeFacts())
    assert only(compared(path, of, mapping)[0]).gap == 0
    assert {group.instance_type for group in compared(path, of)[0].groups} == {"", P5}


def test_a_wrong_map_is_told_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "map.csv"
    file.write_text("cluster,nod,instance_type,gpus\nprod,a,,\n,,p5.48xlarge,many\n")
    with pytest.raises(ConfigError) as told:
        read_mapping(file)
    assert [problem.split(": ")[0].removeprefix(str(file)) for problem in told.value.problems] == [":1", ":2", ":3"]


def test_without_the_number_of_gpus_the_gap_stays_unexplained_and_says_what_to_give(tmp_path: Path) -> None:
    path = bill_file(tmp_path, FOCUS_LINE, {"SkuPriceDetails": '{"InstanceType":"g5.48xlarge"}'})
    found, _ = compared(path, ledger({}))
    (one,) = only(found).explanations
    assert (one.kind, one.amount) == ("unexplained", Decimal("480.00"))
    assert "--map" in one.words


GOOGLE_LINE: Cells = {
    **FOCUS_LINE,
    "ServiceProviderName": "Google Cloud",
    "ConsumedUnit": "seconds",
    "ConsumedQuantity": "86400",
    "PricingUnit": "hour",
    "PricingQuantity": "24",
    "SkuPriceDetails": "",
    "x_InstanceType": "",
}


def google_parts(gpus: str = "Nvidia H100 80GB GPU attached to A3 running in Iowa", **common: str) -> list[Cells]:
    """A day of an instance of 8 GPUs for 480, as Google bills it: cores, memory and GPUs, and the fees of its image."""
    rows = [
        ("A3 Instance Core running in Iowa", "hour", "4992", "40"),
        ("A3 Instance Ram running in Iowa", "gibibyte hour", "44928", "30"),
        (gpus, "hour", "192", "410"),
        ("Licensing Fee for Container-Optimized OS from Google (GPU cost)", "hour", "192", "0"),
        ("SSD backed Local Storage attached to A3", "gibibyte month", "800", "2"),
    ]
    return [
        {
            **common,
            "ChargeDescription": name,
            "PricingUnit": unit,
            "PricingQuantity": quantity,
            **dict.fromkeys(("ListCost", "ContractedCost", "EffectiveCost", "BilledCost"), cost),
        }
        for name, unit, quantity, cost in rows
    ]


@pytest.mark.parametrize("told_by", ["x_InstanceType", "map"])
def test_an_instance_that_is_billed_in_parts_has_the_hours_of_its_gpus_and_the_money_of_all(
    tmp_path: Path, told_by: str
) -> None:
    a3 = "a3-highgpu-8g"
    is_mapped = told_by == "map"
    mapping = (
        Mapping(resources={"i-1": ("prod", "node-a")}, instance_types={("prod", "node-a"): a3})
        if is_mapped
        else Mapping()
    )
    path = bill_file(tmp_path, GOOGLE_LINE, *google_parts(x_InstanceType="" if is_mapped else a3))
    of = ledger(whole_node(2.0), facts=replace(FACTS, instance_type=a3))
    group = only(compared(path, of, mapping)[0])
    assert (group.billed, group.billed_gpu_hours) == (Decimal("482.00"), 192)
    assert amounts(group) == {"price_book": "96.00", "other": "2.00"}


def test_an_instance_of_another_cloud_with_an_image_that_google_publishes_keeps_its_hours(tmp_path: Path) -> None:
    path = bill_file(
        tmp_path, {**FOCUS_LINE, "ServiceProviderName": "AWS", "PublisherName": ""}, {"PublisherName": "Google LLC"}
    )
    group = only(compared(path, ledger(whole_node()))[0])
    assert group.billed_gpu_hours == 192


def test_gpus_that_are_billed_by_themselves_need_no_number_of_them(tmp_path: Path) -> None:
    name = "g2-standard-96"
    path = bill_file(tmp_path, GOOGLE_LINE, *google_parts("Nvidia L4 GPU running in Iowa", x_InstanceType=name))
    of = ledger({key("a"): held(100.5, 2.5)}, facts=replace(FACTS, instance_type=name))
    group = only(compared(path, of)[0])
    assert group.billed_gpu_hours == 192
    assert amounts(group) == {"not_metered": "228.75", "other": "2.00"}


def test_where_no_line_is_known_to_be_for_gpus_hours_are_unknown_and_the_gap_unexplained(tmp_path: Path) -> None:
    name = "a3-highgpu-8g"
    path = bill_file(tmp_path, GOOGLE_LINE, *google_parts("SKU 1234", x_InstanceType=name))
    of = ledger(whole_node(2.0), facts=replace(FACTS, instance_type=name))
    group = only(compared(path, of)[0])
    assert group.billed_gpu_hours is None
    assert amounts(group) == {"unexplained": "96.00", "other": "2.00"}
    assert "no hours of instances" in group.explanations[-1].words
    for form in ("table", "csv", "json"):
        write_reconciliation(compared(path, of)[0], form, io.StringIO())


def test_how_many_gpus_a_node_has_is_told_by_its_fullest_day(tmp_path: Path) -> None:
    path = bill_file(tmp_path, FOCUS_LINE, {"SkuPriceDetails": '{"InstanceType":"p5.48xlarge"}'})
    assert only(compared(path, ledger(whole_node()))[0]).billed_gpu_hours == 192


@pytest.mark.parametrize(("text", "words"), [("", "empty"), ("a,b\n1,2\n", "neither FOCUS"), ('a,"b\n', "not CSV")])
def test_what_is_no_bill_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bill.csv"
    path.write_text(text)
    with pytest.raises(ExporterError, match=words):
        compared(path, ledger(whole_node()))


def test_our_own_export_can_be_read_as_a_bill(tmp_path: Path) -> None:
    of = ledger(whole_node())
    path = tmp_path / "focus.csv"
    path.write_text(exported(of)[0])
    bill = read_bill([path], of.window, Mapping())
    assert bill.scope.malformed == 0


cells = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["NaN", "1e999999999", "-1e-99999999", "0001-01-01T00:00:00+14:00", '{"GpuCount":Infinity}', "\x1b"]
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from([FOCUS_LINE, CUR_LINE]),
    wild=st.lists(st.dictionaries(st.sampled_from([*FOCUS_LINE, *CUR_LINE]), cells, max_size=3), max_size=4),
)
def test_whatever_stands_in_a_bill_the_rest_still_sums(
    tmp_path_factory: pytest.TempPathFactory, form: Cells, wild: list[Cells]
) -> None:
    changes = [{name: value for name, value in change.items() if name in form} for change in wild]
    path = bill_file(tmp_path_factory.mktemp("wild"), form, {}, *changes)
    found, bill = compared(path, ledger(whole_node()))
    assert bill.scope.lines == len(changes) + 1
    for one in bill.malformed:
        assert one.what.isprintable()
    for kind in ("table", "csv", "json"):
        write_reconciliation(found, kind, io.StringIO())


money = st.decimals(min_value=0, max_value=10_000, places=6, allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(st.tuples(money, money, money, st.integers(0, 24)), min_size=1, max_size=6),
    price=st.floats(0.01, 50),
    hours=st.floats(0.5, 192),
    part=st.floats(0.1, 1),
    unpriced=st.floats(0, 1),
)
def test_explanations_sum_to_the_gap_to_the_cent(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[tuple[Decimal, Decimal, Decimal, int]],
    price: float,
    hours: float,
    part: float,
    unpriced: float,
) -> None:
    changes = [
        {"ListCost": f"{a}", "ContractedCost": f"{b}", "EffectiveCost": f"{c}", "ConsumedQuantity": str(h)}
        for a, b, c, h in lines
    ]
    path = bill_file(tmp_path_factory.mktemp("bill"), FOCUS_LINE, *changes)
    of = ledger({key("a"): held(hours, price, unpriced_hours=hours * unpriced), nobody(): held(hours, None)})
    found, _ = compared(path, of, gpu_part=part)
    billed, metered, gap = found.total("USD")
    assert gap == billed - metered
    assert abs(billed - sum((c for _, _, c, _ in lines), Decimal(0))) <= Decimal("0.01")


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_a_reconciliation_in_each_format_is_the_golden_one(tmp_path: Path, form: str) -> None:
    path = bill_file(
        tmp_path,
        FOCUS_LINE,
        {"ContractedCost": "432", "EffectiveCost": "300", "BilledCost": "0"},
        {"ResourceId": "i-2", "ContractedCost": "432", "EffectiveCost": "432", "BilledCost": "432"},
        {"SkuPriceDetails": '{"InstanceType":"g6.xlarge","GpuCount":1}', "EffectiveCost": "12.345"},
        {"SkuPriceDetails": "", "ResourceId": "bucket", "EffectiveCost": "77"},
    )
    found, _ = compared(path, ledger(whole_node(2.4)), gpu_part=0.95)
    stream = io.StringIO()
    write_reconciliation(found, form, stream)
    golden = GOLDEN / f"reconcile.{'txt' if form == 'table' else form}"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(stream.getvalue())
    assert stream.getvalue() == golden.read_text()


def test_wrong_flags_are_all_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reconcile", "--bill", "x.csv", "--window", "never", "--gpu-part", "2"]) == 2
    told = capsys.readouterr().err
    assert "--gpu-part: value '2.0' is not a part" in told
    assert "window" in told
    assert "--prometheus" in told


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        (b"\xff\xfe", "not CSV"),
        (b"node,resource\na,b,c\n", ":2: more fields than the header"),
        (b"instance_type,gpus\np5.48xlarge,0\n", ":2: says nothing that is known"),
        (b"node,gpus\na,8\n", ":2: says nothing that is known"),
        (b"node,gpu\na,8\n", ":1: no such column: 'gpu'; allowed: a CSV file with a header of some of"),
        (b"node,gpus\n" + b"a,8\n" * 1000, "980 more such lines"),
    ],
)
def test_a_map_that_cannot_be_read_is_told_in_words(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "map.csv"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_mapping(file)


def test_a_mapped_line_of_a_bill_tells_the_type_of_a_node_without_labels(tmp_path: Path) -> None:
    mapping = Mapping(resources={"i-1": ("prod", "node-a")})
    found, _ = compared(bill_file(tmp_path, FOCUS_LINE, {}), ledger(whole_node(), facts=NodeFacts()), mapping)
    assert (only(found).instance_type, only(found).region, only(found).gap) == (P5, "us-east-1", 0)


def test_a_mapped_line_without_a_type_counts_for_its_node(tmp_path: Path) -> None:
    mapping = Mapping(resources={"i-1": ("prod", "node-a")}, instance_types={("prod", "node-a"): P5}, gpus={P5: 8})
    path = bill_file(tmp_path, FOCUS_LINE, {"SkuPriceDetails": ""})
    assert only(compared(path, ledger(whole_node(), facts=NodeFacts()), mapping)[0]).gap == 0


def test_a_month_in_one_line_is_compared_as_a_whole(tmp_path: Path) -> None:
    line = {"ChargePeriodEnd": "2026-10-03T00:00:00Z", "ConsumedQuantity": "48", "EffectiveCost": "960"}
    group = only(
        compared(
            bill_file(tmp_path, FOCUS_LINE, {**line, "ListCost": "960", "ContractedCost": "960"}),
            ledger(whole_node(), whole_node()),
        )[0]
    )
    assert (group.gap, amounts(group)) == (0, {})


def test_what_has_neither_price_nor_bill_is_a_note_and_so_is_a_period_of_parts_of_days(tmp_path: Path) -> None:
    lines = {key("a", node="own"): held(12.0, None)}
    path = bill_file(tmp_path, FOCUS_LINE, {"ChargePeriodStart": "2025-01-01T00:00:00Z"})
    found, _ = compared(path, ledger(lines, chunk_seconds=43_200))
    assert found.groups == ()
    assert f"{P5} in us-east-1: 12.0 GPU-hours have no price and are on no bill" in found.notes
    assert any("not of whole UTC days" in note for note in found.notes)


def test_the_table_tells_all_that_was_left_out_and_shows_hostile_names_harmlessly(tmp_path: Path) -> None:
    path = bill_file(
        tmp_path,
        FOCUS_LINE,
        {},
        {"RegionId": "\x1b[2J\u202eevil"},
        {"ChargePeriodStart": "2026-09-30T00:00:00Z"},
        {"SubAccountId": "other"},
        {"BilledCost": "\x1b[31mred"},
        {"BillingCurrency": "EUR", "RegionId": "eu-west-1"},
    )
    of = replace(ledger(whole_node()), notes=("The engine\x1b warned",))
    abroad = {key("b", node="far"): held(192.0)}
    both = ledger({**whole_node(), **abroad})
    nodes = {**both.nodes, ("prod", "far"): replace(FACTS, region="eu-west-1")}
    of = replace(both, nodes=nodes, notes=of.notes)
    found, _ = compared(path, of, Mapping(accounts=frozenset(("111122223333",))))
    stream = io.StringIO()
    write_reconciliation(found, "table", stream)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "\u202e" not in text
    for words in (
        "1 of another time",
        "1 of other accounts",
        "1 could not be read",
        "the bill is in EUR, the ledger in USD",
        "The engine? warned",
    ):
        assert words in text


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_half_a_surrogate_pair_in_a_name_costs_nothing(form: str, tmp_path: Path) -> None:
    facts = replace(FACTS, instance_type="p5\ud800")
    found, _ = compared(bill_file(tmp_path, FOCUS_LINE, {}), ledger(whole_node(), facts=facts))
    stream = io.StringIO()
    write_reconciliation(found, form, stream)
    assert "p5?" in stream.getvalue().encode().decode(), "or the file could not be written"


def test_what_could_not_be_read_is_told_with_its_period(tmp_path: Path) -> None:
    failure = Failure(
        window=Window(start_seconds=START, end_seconds=START + DAY), what="owner:x", reason="HTTP\x1b 503"
    )
    of = replace(ledger(whole_node()), failures=(failure,))
    found, _ = compared(bill_file(tmp_path, FOCUS_LINE, {}), of)
    table, document = io.StringIO(), io.StringIO()
    write_reconciliation(found, "table", table)
    assert "2026-10-01 00:00 to 2026-10-02 00:00 UTC: owner:x: HTTP? 503" in table.getvalue()
    write_reconciliation(found, "json", document)
    (told,) = json.loads(document.getvalue())["failures"]
    assert (told["start"], told["end"]) == ("2026-10-01T00:00:00Z", "2026-10-02T00:00:00Z")


def test_a_bill_that_is_none_is_refused_before_prometheus_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bill.csv"
    path.write_text("a,b\n")
    arguments = ["--bill", str(path), "--window", "2025-10-01", "--prometheus", "http://127.0.0.1:9"]
    assert main(["reconcile", *arguments]) == 1
    assert "neither FOCUS" in capsys.readouterr().err


def test_bills_that_are_none_twice_or_a_pipe_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, pipe = tmp_path / "bill.csv", tmp_path / "pipe"
    path.touch()
    os.mkfifo(pipe)
    options = ["--window", "2025-10", "--prometheus", "http://127.0.0.1:9"]
    again = tmp_path / "." / "bill.csv"
    for bills, words in (
        (",", "names no file"),
        (f"{path},{again}", "is named twice, and would count twice"),
        (str(pipe), "is a pipe or device, and bills are read twice"),
    ):
        assert main(["reconcile", "--bill", bills, *options]) == 2
        assert words in capsys.readouterr().err


def test_a_bill_beside_no_ledger_at_all_is_a_failure(
    fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bill_file(tmp_path, FOCUS_LINE, {})
    arguments = ["--bill", str(path), "--window", "2025-10", "--prometheus", fleet_prometheus.url]
    assert main(["reconcile", *arguments]) == 1
    assert "there is no ledger in this period" in capsys.readouterr().err
