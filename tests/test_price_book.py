"""Price books as files: valid content, and a report of all mistakes at once, row by row."""

from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.accounting.prices import PriceBook, PricedGpu
from exporter.config import load_agent, price_book
from exporter.config.price_book import KNOWN_MODELS
from exporter.config.types import CURRENCIES
from exporter.errors import ConfigError
from exporter.model.attribution import NodeFacts
from gpu_simulator.models import MODELS

H100 = "NVIDIA H100 80GB HBM3"
TAIL = "source: s, as_of: 2026-01-01"
BAD = """\
currency: usd
gpu_part: 1.5
lst_prices: off
rows:
  - model: NVIDIA H100*
    per_gpu_hour: -1
    source: x
    as_of: 2026-02-30
  - node_hour: .nan
    sorce: x
    as_of: 2026-01-01
    from: 2026-05-01
    to: 2026-01-01
  - {model: NVIDIA L40S, per_gpu_hour: 2, source: s, as_of: 2026-01-01, from: 2026-05-01}
  - {model: NVIDIA L40S, per_gpu_hour: 3, source: s, as_of: 2026-01-01, to: 2026-06-01T12:00:00+02:00}
  - {node: a, per_gpu_hour: 1, node_hour: 2, gpus: 2, source: s, as_of: 2026-01-01}
  - {node: b, capacity_type: Spot, source: s, as_of: 2026-01-01, from: 2026-05-01T12:00}
  - {node: c, on_prem: {capex: 1, years: 0, gpus: 2.5, measured_energy: true, kw_per_gpu: 1, pue: 0.5, x: 1},\
 source: s, as_of: 1.1.26}
  - 7
  - {node: d, per_gpu_hour: 1, gpus: 2, per_gpu_hour: 2, source: "", as_of: 2026-01-01}
"""
TOLD = """\
1: currency: 'usd' is not known; did you mean 'USD'? Allowed: an ISO 4217 code such as USD or EUR
2: gpu_part: '1.5' is not a number in range; allowed: more than 0, at most 1
6: row 1: per_gpu_hour: '-1' is not a number in range; allowed: 0 or more
8: row 1: as_of: '2026-02-30' is not a day; allowed: such as 2026-01-31
9: row 2: node_hour: '.nan' is not a number in range; allowed: 0 or more
9: row 2: gpus: missing; allowed: the physical GPUs of the node, 1 to 1024
13: row 2: to: not after from; allowed: a time after 2026-05-01
9: row 2: source: missing; allowed: where the price comes from, such as a list or a contract
10: row 2: sorce: unknown key; did you mean 'source'?
16: row 5: node_hour: per_gpu_hour and node_hour are given; allowed: one of per_gpu_hour, node_hour, on_prem
17: row 6: capacity_type: 'Spot' is not known; did you mean 'spot'? Allowed: on-demand, spot, reserved
17: row 6: price: missing; allowed: one of per_gpu_hour, node_hour, on_prem
17: row 6: from: '2026-05-01T12:00' is a time without its zone; allowed: 2026-01-31, or a time with its zone such\
 as 2026-01-31T12:00:00Z
18: row 7: on_prem: years: '0' is not a number in range; allowed: more than 0, at most 50
18: row 7: on_prem: gpus: '2.5' is not a whole number; allowed: the physical GPUs of the node, 1 to 1024
18: row 7: on_prem: kw_per_gpu: given with measured_energy: true, so that energy would be paid twice; keep one
18: row 7: on_prem: pue: '0.5' is not a number in range; allowed: 1 to 10
18: row 7: on_prem: per_kwh: missing; allowed: 0 or more
18: row 7: as_of: '1.1.26' is not a day; allowed: such as 2026-01-31
19: row 8: not a mapping; allowed: keys with values
20: row 9: per_gpu_hour: given twice, first in line 20; keep one
20: row 9: gpus: belongs to node_hour, which is not given; take it out
20: row 9: source: empty, nested or not printable; allowed: where the price comes from, such as a list or a contract
3: lst_prices: unknown key; did you mean 'list_prices'?
15: row 4: rows 3 and 4 overlap from 2026-05-01 to 2026-06-01T10:00:00Z: both can match model NVIDIA L40S and neither\
 is more specific; give one of them an end, or one more key
"""


def book(*rows: str, head: str = "currency: EUR") -> PriceBook:
    return price_book.parse(head + "\nrows:\n" + "".join(f"  - {{{row}, {TAIL}}}\n" for row in rows), "b.yaml")


def mistakes(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        price_book.parse(text, "b.yaml")
    return caught.value.problems


def hourly(found: PriceBook, model: str = H100, node: str = "n", at: float = 1.8e9) -> float | None:
    price = found.price(PricedGpu(model, node, NodeFacts()), at)
    return None if price is None else price.per_hour


def test_every_mistake_of_a_book_is_reported_with_line_row_and_key() -> None:
    reported = [line.removeprefix("b.yaml:").partition("on_prem: x: unknown key")[0] for line in mistakes(BAD)]
    expected = TOLD.splitlines()
    assert [line for line in expected if line not in reported] == []
    assert [line for line in reported if line not in expected] == ["18: row 7: "]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "b.yaml:1: not a price book"),
        ("- a", "b.yaml:1: not a price book"),
        ("rows: [", "not YAML"),
        ("currency: USD", "b.yaml:1: rows: missing; allowed: a list of 1 to 20000 prices"),
        ("currency: USD\nrows: []", "b.yaml:2: rows: empty, or not a list; allowed"),
        ("currency: USD\nrows:", "b.yaml:2: rows: empty, or not a list; allowed"),
        ("currency: USD\nrows: {a: 1}", "b.yaml:2: rows: empty, or not a list; allowed"),
        (f"currency: USD\nrows: [{'a,' * 20_001}]", "b.yaml:2: rows: 20,001 of them, which is too many"),
        ("rows:\n  - {per_gpu_hour: 1, source: s, as_of: 2026-01-01}", "currency: missing"),
        ("\x00", "not YAML"),
    ],
)
def test_invalid_book_is_reported_in_one_line(text: str, words: str) -> None:
    (reported,) = mistakes(text)
    assert words in reported
    assert "\n" not in reported


def test_price_is_per_gpu_per_node_or_from_the_on_prem_formula() -> None:
    found = book(
        "node: a, per_gpu_hour: 2.5",
        "node: b, node_hour: 40, gpus: 8",
        "node: c, on_prem: {capex: 280320, years: 4, gpus: 8, kw_per_gpu: 1, per_kwh: 0.1}",
        "node: d, on_prem: {capex: 280320, years: 4, gpus: 8, measured_energy: true, pue: 1.5, per_kwh: 0.2}",
        head="currency: EUR\ngpu_part: 0.9\nlist_prices: off",
    )
    assert [hourly(found, node=node) for node in "abcde"] == [2.5, 4.5, pytest.approx(1.0), pytest.approx(0.9), None]
    energy = found.price(PricedGpu(H100, "d", NodeFacts()), 0.0)
    assert energy is not None
    assert (energy.currency, energy.per_kwh, energy.source) == ("EUR", pytest.approx(0.3), "b.yaml:4")
    planned = found.price(PricedGpu(H100, "c", NodeFacts()), 0.0)
    assert planned is not None
    assert planned.per_kwh == 0.0, "the hourly price includes its power"


def test_times_are_utc_days_or_moments_with_a_zone() -> None:
    found = book(
        "per_gpu_hour: 1, to: 2026-07-01T12:00:00+02:00",
        "per_gpu_hour: 2, from: 2026-07-01T10:00:00Z, to: 2026-07-02",
        head="currency: EUR\nlist_prices: off",
    )
    noon = 1782900000.0  # 2026-07-01T10:00:00Z
    seen = [hourly(found, at=at) for at in (0.0, noon - 1, noon, noon + 14 * 3600 - 1, noon + 14 * 3600)]
    assert seen == [1.0, 1.0, 2.0, 2.0, None]


def test_list_prices_are_the_fallback_of_a_book_unless_disabled() -> None:
    behind = book("node: z, per_gpu_hour: 1").price(PricedGpu(H100, "n", NodeFacts()), 0.0)
    assert behind is not None
    assert behind.fallback is True
    assert behind.currency == "USD"
    assert hourly(book("node: z, per_gpu_hour: 1", head="currency: EUR\nlist_prices: off")) is None


@pytest.mark.parametrize(("word", "behind"), [("on", True), ("true", True), ("off", False), ("false", False)])
def test_list_prices_accept_on_off_and_true_false(word: str, *, behind: bool) -> None:
    head = f"currency: EUR\nlist_prices: {word}"
    assert (hourly(book("node: z, per_gpu_hour: 1", head=head)) is not None) == behind


def test_list_prices_apply_without_a_book_and_none_disables_them() -> None:
    listed = price_book.load(None).price(PricedGpu(H100, "n", NodeFacts()), 0.0)
    assert listed is not None
    assert listed.fallback is True
    off = price_book.load(Path("none"))
    assert (hourly(off), off.description) == (None, "")


def test_every_list_price_has_source_region_and_date_in_a_plausible_range() -> None:
    rows = price_book.bundled().rows
    assert price_book.bundled().warnings == ()
    assert all(0.1 < row.price.per_hour < 50 for row in rows)
    assert all(date.fromisoformat(row.price.as_of) <= date(2026, 11, 26) for row in rows)
    assert all(row.price.as_of in row.source or row.price.as_of[:7] in row.source for row in rows)
    for row in rows:
        region = row.match.region.rstrip("*")
        assert region in row.source if row.match.instance_type else "region" in row.source, row.price.source


@pytest.mark.parametrize(
    ("facts", "model", "per_hour", "source"),
    [
        (("p5.48xlarge", "us-east-1"), H100, 6.88, "aws-p5.48xlarge"),
        (("p5.48xlarge", "eu-west-1"), H100, 6.16, "coreweave-h100"),
        (("Standard_ND96isr_H100_v5", "eastus2"), H100, 12.29, "azure-ND96isr_H100_v5"),
        (("a3-highgpu-8g", "us-central1"), H100, 11.06125, "gcp-a3-highgpu-8g"),
        (("", ""), "Tesla T4", 0.526, "aws-t4"),
        (("", ""), "NVIDIA A30", None, ""),
    ],
)
def test_list_price_of_the_instance_type_overrides_that_of_the_model(
    facts: tuple[str, str], model: str, per_hour: float | None, source: str
) -> None:
    node = NodeFacts(instance_type=facts[0], region=facts[1])
    price = price_book.bundled().price(PricedGpu(model, "n", node), 1.8e9)
    assert (price and price.per_hour) == (per_hour if per_hour is None else pytest.approx(per_hour))
    assert (price.source if price else "") == (source and f"list-prices:{source}")


def test_unmatched_pattern_and_zero_price_give_warnings() -> None:
    reported = book('model: "NVIDIA H1000*", per_gpu_hour: 1', "node: a, per_gpu_hour: 0").warnings
    assert reported[0].startswith("b.yaml:3: row 1: model: 'NVIDIA H1000*' matches no GPU name known here")
    assert reported[1].startswith("b.yaml:4: row 2: the price is 0")
    assert len(reported) == 2


def test_every_simulated_model_is_a_known_one() -> None:
    assert {model.name for model in MODELS.values()} <= set(KNOWN_MODELS)
    assert {"USD", "EUR", "JPY"} <= CURRENCIES
    assert all(len(code) == 3 for code in CURRENCIES)


def test_unreadable_file_is_reported_in_one_line(tmp_path: Path) -> None:
    latin, large = tmp_path / "latin.yaml", tmp_path / "large.yaml"
    latin.write_bytes(b"\xff\xfe")
    large.write_bytes(b"#" * (9 << 20))
    for path, words in (
        (tmp_path / "no.yaml", "No such file"),
        (latin, "not UTF-8"),
        (large, "larger"),
        (tmp_path, ""),
    ):
        with pytest.raises(ConfigError) as caught:
            price_book.load(path)
        (reported,) = caught.value.problems
        assert words in reported
        assert str(path) in reported


def test_invalid_book_prevents_the_agent_start_with_all_other_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "book.yaml"
    path.write_text(BAD)
    with pytest.raises(ConfigError) as caught:
        load_agent({"price_book": str(path), "simulate": "demo", "capacity_type": "sopt", "linger": "1s"}, {})
    reported = caught.value.problems
    assert sum(line.startswith(f"{path}:") for line in reported) == len(TOLD.splitlines()) + 1
    assert any(line.endswith("did you mean 'spot'? Allowed: on-demand, spot, reserved") for line in reported)
    assert any(line.startswith("linger (from --linger): value '1s'") for line in reported)


def test_rows_with_an_invalid_price_are_still_checked_for_overlaps() -> None:
    rows = f"  - {{per_gpu_hour: -1, {TAIL}}}\n  - {{per_gpu_hour: 1, {TAIL}}}\n"
    reported = mistakes(f"currency: USD\nrows:\n{rows}")
    assert len(reported) == 2
    assert "rows 1 and 2 overlap at all times: both can match every GPU" in reported[1]


def test_thousands_of_exact_rows_are_read_without_pairwise_comparison() -> None:
    rows = [f"instance_type: t{number}, region: r, per_gpu_hour: 1" for number in range(2000)]
    assert hourly(book(*rows, head="currency: EUR\nlist_prices: off")) is None


SCALARS = st.sampled_from(["1", "-1", "x", "2026-01-01", ".inf", "~", "", "[1]", "{a: 1}", "on", "'*'", "1e999"])
KEYS = st.sampled_from(
    [
        "model",
        "node",
        "capacity_type",
        "per_gpu_hour",
        "node_hour",
        "gpus",
        "on_prem",
        "from",
        "to",
        "source",
        "as_of",
        "q",
    ]
)


@given(st.lists(st.dictionaries(KEYS, SCALARS, max_size=6), max_size=4), SCALARS)
def test_arbitrary_book_is_read_or_refused_line_by_line(rows: list[dict[str, str]], currency: str) -> None:
    listed = ", ".join("{" + ", ".join(f"{key}: {value}" for key, value in row.items()) + "}" for row in rows)
    found, problems = price_book.examine(f"currency: {currency}\nrows: [{listed}]", "b.yaml")
    assert all(line.startswith("b.yaml:") and "\n" not in line for line in problems)
    assert all(row.price.per_hour >= 0 for row in found.rows)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ('from: "0001-01-01T00:00:00+14:00"', "from: '0001-01-01T00:00:00+14:00' is not a date"),
        ('to: "9999-12-31T23:59:59-12:00"', "to: '9999-12-31T23:59:59-12:00' is not a date"),
        ("region: ~", "region: empty"),
        (
            "region: *",
            "x.yaml:3: not YAML: expected alphabetic or numeric character, but found '}'; put text that begins",
        ),
        ("region: *east*", "put text that begins with * in quotes"),
        ("node: null", "node: empty"),
        (f"node: {'a*' * 400}", "node: longer than 500 characters"),
    ],
)
def test_impossible_value_is_reported_for_its_key(keys: str, words: str) -> None:
    _, problems = price_book.examine(
        f"currency: USD\nrows:\n  - {{model: {H100}, per_gpu_hour: 1, {TAIL}, {keys}}}\n", "x.yaml"
    )
    (problem,) = problems
    assert words in problem


def test_book_with_only_overlaps_is_refused_quickly() -> None:
    row = f"  - {{model: {H100}, per_gpu_hour: 1, {TAIL}}}\n"
    _, problems = price_book.examine("currency: USD\nrows:\n" + row * 1500, "x.yaml")
    assert len(problems) == 101
    assert "there may be more overlaps" in problems[-1]


def test_duplicate_row_names_and_one_day_gaps_give_warnings() -> None:
    book = price_book.parse(
        f"""currency: USD
rows:
  - {{name: a, model: {H100}, per_gpu_hour: 1, {TAIL}, to: 2026-06-30}}
  - {{name: a, model: {H100}, per_gpu_hour: 1, {TAIL}, from: 2026-07-01, to: 2026-08-01}}
  - {{name: b, model: {H100}, per_gpu_hour: 1, {TAIL}, from: 2026-12-01}}
""",
        "x.yaml",
    )
    twice, gap = book.warnings
    assert "x.yaml:4: row 2: name: 'a' is row 1's, too" in twice
    assert "x.yaml:3: row 1: to:" in gap
    assert "from 2026-06-30 to 2026-07-01" in gap


def test_negative_zero_price_is_zero() -> None:
    book, _ = price_book.examine(f"currency: USD\nrows:\n  - {{model: {H100}, per_gpu_hour: -0, {TAIL}}}\n", "x.yaml")
    assert str(book.rows[0].price.per_hour) == "0.0"
