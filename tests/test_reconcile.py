"""The program in contrib/reconcile: bills with known gaps against an export, with an explanation of every cent."""

import gzip
import json
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from focus_support import FACTS, Lines, as_csv, held, key, ledger, nobody

from exporter.cost.focus import write_focus
from exporter.cost.ledger import FleetLedger
from exporter.model.attribution import NodeFacts

PROGRAM = Path(__file__).parent.parent / "contrib" / "reconcile" / "reconcile.py"
P5 = "p5.48xlarge"
A3 = "a3-highgpu-8g"
Cells = Mapping[str, str]
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
    "pricing/publicOnDemandCost": "20",
    "product/instanceType": P5,
    "product/regionCode": "us-east-1",
    "product/gpu": "8",
    "reservation/EffectiveCost": "",
    "reservation/ReservationARN": "",
    "reservation/UnusedAmortizedUpfrontFeeForBillingPeriod": "",
    "reservation/UnusedRecurringFee": "",
    "savingsPlan/SavingsPlanEffectiveCost": "",
}
NO_TIME: Cells = {"ConsumedQuantity": "", "ConsumedUnit": "", "SkuPriceDetails": ""}


def node(per_hour: float | None = 2.5, hours: float = 192.0) -> Lines:
    """Return eight GPUs for a day."""
    return {key("a"): held(hours / 2, per_hour), nobody(): held(hours / 2, per_hour, active=0, idle=1)}


def bill(folder: Path, *changes: Cells, line: Cells = FOCUS_LINE) -> Path:
    path = folder / "bill.csv"
    path.write_text(as_csv([line, *[{**line, **change}.values() for change in changes]]))
    return path


def run(
    bill: Path, of: FleetLedger, *options: str, limits: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    export = bill.parent / "gpus.csv"
    with export.open("w") as stream, (bill.parent / "gpus.csv.metadata.json").open("w") as metadata:
        write_focus(of, stream, metadata_stream=metadata)
    command = [sys.executable, str(PROGRAM), str(export), "--bill", str(bill), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=limits)


def compared(bill: Path, of: FleetLedger, *options: str, code: int = 0) -> dict[str, Any]:
    done = run(bill, of, "--format", "json", *options)
    assert done.returncode == code, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    for group in document["groups"]:
        if not group["note"]:
            explained = sum((Decimal(one["amount"]) for one in group["explanations"]), Decimal(0))
            assert explained == Decimal(group["gap"])
    return document


def amounts(document: Mapping[str, Any]) -> dict[str, str]:
    (group,) = document["groups"]
    return {one["kind"]: one["amount"] for one in group["explanations"]}


@pytest.mark.parametrize(
    ("change", "per_hour", "options", "expected"),
    [
        ({}, 2.5, (), {}),
        ({"ListCost": "NULL", "ContractedCost": "null"}, 2.5, (), {}),
        ({}, 2.0, (), {"price_book": "96.00"}),
        (
            {"ContractedCost": "432", "EffectiveCost": "300"},
            2.5,
            (),
            {"negotiated": "-48.00", "commitments": "-132.00"},
        ),
        ({}, 2.375, ("--gpu-part", "0.95"), {"not_gpu": "24.00"}),
    ],
)
def test_rate_differences_explain_a_gap(
    tmp_path: Path, change: Cells, per_hour: float, options: Sequence[str], expected: dict[str, str]
) -> None:
    assert amounts(compared(bill(tmp_path, change), ledger(node(per_hour)), *options)) == expected


def test_unmetered_hours_are_separate_from_unrecorded_hours(tmp_path: Path) -> None:
    of = ledger(node(hours=96.0))  # twelve hours of one of two nodes
    of = replace(of, chunks=tuple(replace(chunk, recorded_hours={"prod": 12}) for chunk in of.chunks))
    found = compared(bill(tmp_path, {}, {"ResourceId": "i-2"}), of)
    assert amounts(found) == {"not_recorded": "480.00", "not_metered": "240.00"}
    assert (found["recorded_hours"], found["expected_hours"]) == (12, 24)


def test_too_many_hours_of_a_day_do_not_hide_too_few_of_another(tmp_path: Path) -> None:
    tomorrow = {"ChargePeriodStart": "2026-10-02T00:00:00Z", "ChargePeriodEnd": "2026-10-03T00:00:00Z"}
    path = bill(tmp_path, {}, {**tomorrow, "ConsumedQuantity": "12", "EffectiveCost": "240"})
    (group,) = compared(path, ledger(node(hours=96.0), node()))["groups"]
    hours = {one["kind"]: one["gpu_hours"] for one in group["explanations"]}
    assert (hours["not_metered"], hours["not_billed"]) == (96, 96)


def test_two_day_line_is_compared_as_a_whole(tmp_path: Path) -> None:
    costs = dict.fromkeys(("ListCost", "ContractedCost", "EffectiveCost"), "960")
    path = bill(tmp_path, {"ChargePeriodEnd": "2026-10-03T00:00:00Z", "ConsumedQuantity": "48", **costs})
    assert amounts(compared(path, ledger(node(), node()))) == {}


def test_unpriced_gpus_count_at_the_rate_of_the_bill(tmp_path: Path) -> None:
    partly = ledger({key("a"): held(192.0, 2.5, unpriced_hours=96.0)})
    assert amounts(compared(bill(tmp_path, {}), partly)) == {"unpriced": "240.00"}
    other = ledger({key("a"): held(96.0), key("b", node="node-b"): held(96.0, None)})
    mapping = tmp_path / "map.csv"
    mapping.write_text("cluster,node,instance_type\nprod,node-b,p5.48xlarge\n")
    found = amounts(compared(bill(tmp_path, {}), other, "--map", str(mapping)))
    assert found["unpriced"] == "240.00", "a node without a price is in the metadata only"


def test_taxes_credits_transfer_and_unused_commitments_are_separate(tmp_path: Path) -> None:
    path = bill(
        tmp_path,
        {**NO_TIME, "ChargeCategory": "Tax", "EffectiveCost": "10.01"},  # before the line that describes i-1
        {},
        {**NO_TIME, "ChargeCategory": "Credit", "EffectiveCost": "-5"},
        {**NO_TIME, "EffectiveCost": "3.333", "ConsumedUnit": "GB", "ConsumedQuantity": "9"},
        {"CommitmentDiscountStatus": "Unused", "EffectiveCost": "100", "ResourceId": ""},
        {**NO_TIME, "ResourceId": "bucket", "EffectiveCost": "77"},
    )
    found = compared(path, ledger(node()))
    assert amounts(found) == {"unused": "100.00", "tax": "10.01", "credit": "-5.00", "other": "3.33"}
    assert (found["bill"]["gpu_lines"], found["bill"]["other_cost"]) == (5, {"USD": "77.00"})


def test_costs_in_two_currencies_are_not_converted(tmp_path: Path) -> None:
    found = compared(bill(tmp_path, {"BillingCurrency": "EUR"}), ledger(node()))
    assert [group["currency"] for group in found["groups"]] == ["EUR", "USD"]
    assert all("not converted" in group["note"] for group in found["groups"])


def test_instance_types_on_one_side_only_are_a_whole_gap(tmp_path: Path) -> None:
    path = bill(tmp_path, {"SkuPriceDetails": '{"InstanceType":"g5.xlarge","GpuCount":1}'})
    found = compared(path, ledger(node()))
    reported = {group["instance_type"]: group["explanations"][0] for group in found["groups"]}
    assert (reported["g5.xlarge"]["kind"], reported["g5.xlarge"]["amount"]) == ("not_metered", "480.00")
    assert (reported[P5]["kind"], reported[P5]["amount"]) == ("not_billed", "-480.00")


def test_unknown_gpu_count_leaves_the_gap_unexplained(tmp_path: Path) -> None:
    path = bill(tmp_path, {"SkuPriceDetails": '{"InstanceType":"g5.48xlarge"}'})
    (group,) = compared(path, ledger({}))["groups"]
    (one,) = group["explanations"]
    assert (one["kind"], one["amount"]) == ("unexplained", "480.00")
    assert "--map" in one["what"]


def test_unreadable_lines_are_reported_and_not_summed(tmp_path: Path) -> None:
    wrong: Sequence[Cells] = (
        {"EffectiveCost": "lots"},
        {"ChargePeriodStart": "yesterday"},
        {"BilledCost": "1e999999999"},
        {"BillingCurrency": ""},
    )
    path = bill(tmp_path, {}, *wrong, {"ChargePeriodStart": "2026-09-30T00:00:00Z"})
    with path.open("a") as file:
        file.write("too,few\n")
    found = compared(path, ledger(node()), code=3)
    assert (found["bill"]["malformed"], found["bill"]["outside_window"], amounts(found)) == (5, 1, {})
    assert f"{path}:3: EffectiveCost: not a number: lots" in run(path, ledger(node())).stderr


def test_an_old_report_of_aws_is_amortised_by_type_of_line(tmp_path: Path) -> None:
    blank = {"lineItem/UsageType": "", "product/instanceType": "", "lineItem/ResourceId": "", "product/gpu": ""}
    six = {"lineItem/UsageAmount": "6", "lineItem/UnblendedCost": "120", "pricing/publicOnDemandCost": "120"}
    path = bill(
        tmp_path,
        six,
        {**six, "lineItem/LineItemType": "SavingsPlanCoveredUsage", "savingsPlan/SavingsPlanEffectiveCost": "90"},
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
        {"lineItem/UsageType": "USE1-DataTransfer-Out", "lineItem/UnblendedCost": "2", "product/instanceType": ""},
        {"lineItem/UsageType": "UnusedBox:p5.48xlarge", "lineItem/UnblendedCost": "20"},
        line=CUR_LINE,
    )
    found = compared(path, ledger(node()))
    assert amounts(found) == {"commitments": "-120.00", "unused": "32.00", "other": "2.00"}
    assert found["bill"]["other_cost"] == {"USD": "44.00"}
    assert found["groups"][0]["billed"] == "394.00"


def test_a_new_report_of_aws_is_read_from_gzip(tmp_path: Path) -> None:
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
    assert amounts(compared(path, ledger(node()))) == {}


@pytest.mark.parametrize("name", ["g6e.12xlarge", "Standard_ND96isr_H100_v5", "ml.p4d.24xlarge", "our.special"])
def test_gpu_instances_are_detected_by_type_or_node_label(tmp_path: Path, name: str) -> None:
    path = bill(tmp_path, {"SkuPriceDetails": json.dumps({"InstanceType": name, "GpuCount": 8})})
    assert amounts(compared(path, ledger(node(), facts=replace(FACTS, instance_type=name)))) == {}


@pytest.mark.parametrize("name", ["m5.xlarge", "g4ad.xlarge", "Standard_D4s_v5", "n2-standard-8"])
def test_instances_without_gpus_are_ignored(tmp_path: Path, name: str) -> None:
    path = bill(tmp_path, {"SkuPriceDetails": json.dumps({"InstanceType": name})})
    assert compared(path, ledger(node()))["bill"]["other_lines"] == 1


def test_map_links_unlabelled_nodes_to_the_bill(tmp_path: Path) -> None:
    mapping = tmp_path / "map.csv"
    mapping.write_text(
        "cluster,node,resource,instance_type,account,gpus\nprod,node-a,i-1,p5.48xlarge,,\n,,,,111122223333,\n"
        ",,,p5.48xlarge,,8\n"
    )
    path = bill(tmp_path, {"SkuPriceDetails": ""}, {"SubAccountId": "999900001111"})
    found = compared(path, ledger(node(), facts=NodeFacts()), "--map", str(mapping))
    assert (amounts(found), found["bill"]["other_accounts"]) == ({}, 1)


@pytest.mark.parametrize("is_named", [True, False])
def test_google_instance_parts_are_combined(tmp_path: Path, is_named: bool) -> None:  # noqa: FBT001 - a case
    parts = [
        ("A3 Instance Core running in Iowa", "hour", "4992", "40"),
        ("A3 Instance Ram running in Iowa", "gibibyte hour", "44928", "30"),
        ("Nvidia H100 80GB GPU attached to A3 running in Iowa" if is_named else "SKU 1234", "hour", "192", "410"),
        ("Licensing Fee for Container-Optimized OS from Google (GPU cost)", "hour", "192", "0"),
        ("SSD backed Local Storage attached to A3", "gibibyte month", "800", "2"),
    ]
    line = {**FOCUS_LINE, "ServiceProviderName": "Google Cloud", "PricingUnit": "", "PricingQuantity": ""}
    common = {"ConsumedUnit": "seconds", "SkuPriceDetails": "", "x_InstanceType": A3}
    changes = [
        {"ChargeDescription": name, "PricingUnit": unit, "PricingQuantity": quantity}
        | dict.fromkeys(("ListCost", "ContractedCost", "EffectiveCost", "BilledCost"), cost)
        for name, unit, quantity, cost in parts
    ]
    path = bill(tmp_path, *changes, line={**line, **common})
    found = compared(path, ledger(node(2.0), facts=replace(FACTS, instance_type=A3)))
    assert amounts(found) == {"price_book" if is_named else "unexplained": "96.00", "other": "2.00"}
    assert found["groups"][0]["billed_gpu_hours"] == (192 if is_named else None)


def test_explanations_of_many_groups_sum_to_the_cent(tmp_path: Path) -> None:
    chance = random.Random(7)  # noqa: S311 - no secret
    of = ledger({key("a"): held(133.7, 2.123457, unpriced_hours=3.21), nobody(): held(17.3, 1.9)})
    changes = [
        {
            "SkuPriceDetails": json.dumps(
                {"InstanceType": f"{chance.choice(('p5', 'g5', 'g6'))}.48xlarge", "GpuCount": 8}
            ),
            "RegionId": chance.choice(("us-east-1", "eu-west-1", "ap-south-1")),
            "ConsumedQuantity": str(chance.randint(0, 24)),
            "ChargeCategory": chance.choice(("Usage", "Usage", "Usage", "Tax", "Credit")),
        }
        | {name: f"{chance.uniform(0, 900):.6f}" for name in ("ListCost", "ContractedCost", "EffectiveCost")}
        for _ in range(200)
    ]
    found = compared(bill(tmp_path, *changes), of, "--gpu-part", "0.913")
    assert len(found["groups"]) == 9


def test_table_shows_both_sides_and_escapes_names(tmp_path: Path) -> None:
    path = bill(tmp_path, {}, {"RegionId": "\x1b[2J\u202eevil"})
    done = run(path, ledger(node(2.0)))
    assert "price of 2.0000, list price of the bill 2.5000" in done.stdout
    assert "24 of 24 hours of the ledger are recorded" in done.stdout
    assert not {"\x1b", "\u202e"} & set(done.stdout)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "neither FOCUS"),
        (b"a,b\n1,2\n", "neither FOCUS"),
        (b'a,"b\n', "cannot read"),
        (b"\xff\xfe", "cannot read"),
    ],
)
def test_invalid_bill_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bill.csv"
    path.write_bytes(content)
    done = run(path, ledger(node()))
    assert (done.returncode, words in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize("piece", [b"a", b'"a\n",'], ids=["one line", "one record of many lines"])
def test_gzip_bill_is_read_in_bounded_memory(tmp_path: Path, piece: bytes) -> None:
    """A program that reads a record whole ends with a MemoryError at the limit of its process."""
    path = tmp_path / "bill.csv.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(256):
            file.write(piece * ((1 << 20) // len(piece)))
    done = run(path, ledger(node()), limits=lambda: resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20)))
    assert (done.returncode, "a record is longer than 4 MiB" in done.stderr) == (1, True), done.stderr[-500:]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("node,gpu\na,8\n", "unknown column"),
        ("node,gpus\na,8\n", ":2: expected"),
        ("instance_type,gpus\np5,0\n", ":2: expected"),
    ],
)
def test_invalid_map_is_refused_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    mapping = tmp_path / "map.csv"
    mapping.write_text(content)
    done = run(bill(tmp_path, {}), ledger(node()), "--map", str(mapping))
    assert (done.returncode, words in done.stderr) == (1, True), done.stderr


def test_an_export_without_metadata_is_refused(tmp_path: Path) -> None:
    path = bill(tmp_path, {})
    command = [sys.executable, str(PROGRAM), str(path), "--bill", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "write it with --output" in done.stderr) == (1, True)
    assert run(path, ledger(node()), "--gpu-part", "2").returncode == 2
