"""The program in contrib/digest: its figures are those of the ledger, its forms are safe, a webhook gets it once."""

import asyncio
import io
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from files_support import digest, read_yaml
from fleet_support import END_SECONDS, HOSTILE, MARKUP, TURNED, FleetServer, hours, ledger, nobody, owner, truth_between
from service_support import running

from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost.dimensions import UNALLOCATED, UNATTRIBUTED, Dimension, LineKey
from exporter.cost.document import document
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.ledger import Failure, Figures, FleetLedger
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.recommend import Recommendation
from exporter.cost.recommend_render import recommendation_document
from exporter.cost.report import Question, make_report
from exporter.cost.store import DayStore
from exporter.cost.store_ledger import close_due_days
from exporter.cost.window import DAY_SECONDS, Window
from gpu_simulator.fleet import FleetTruth

GOLDEN = Path(__file__).parent / "golden"
NOW = 1_792_400_400.0
"""2026-10-19T09:00Z, a Monday."""
MONDAY = digest.parse_week("lastweek", NOW)
WEEK_SECONDS = 7 * DAY_SECONDS
PAGE = "https://cost.example.org/gpu"
WEEK_38 = ("--week", "2026-W38")
TOKEN = "xoxb/very-secret"  # noqa: S105 - not a real one

Digest = Any
Section = Any
Document = Mapping[str, Any]
Lines = dict[LineKey, Figures]
Handler = Callable[[web.Request], web.Response]


def weeks(*, before: int = 7, after: Lines | None = None) -> FleetLedger:
    """Return October's first 18 days; the last 7 are the week, and ``before`` of the 7 before it were recorded."""
    usual: Lines = {
        owner("vision", "resnet", "core"): hours(active=40.0, idle=8.0, usd=192.0),
        owner("lab", "notebook", "research", cluster="east"): hours(active=2.0, idle=22.0, usd=96.0),
        owner("old", "sweep", "gone"): hours(active=24.0, usd=96.0),
        nobody(UNALLOCATED): hours(idle=24.0, usd=96.0),
    }
    new: Lines = after or {
        owner("vision", "resnet", "core"): hours(active=60.0, profiled=(12.0, 36.0), idle=12.0, usd=288.0),
        owner("lab", "notebook", "research", cluster="east"): hours(active=1.0, idle=11.0, usd=48.0),
        owner("lab", HOSTILE, MARKUP): hours(idle=24.0, eur=60.0),
        owner("<!channel>&`*_~|", TURNED): hours(idle=12.0, unknown=12.0, usd=36.0),
        owner("batch", "", kind=""): hours(idle=2.0, usd=8.0),
        nobody(UNATTRIBUTED): hours(active=3.0, usd=12.0),
        nobody(UNALLOCATED): hours(idle=12.0, unpriced=2.0, usd=40.0),
    }
    whole = ledger(*(usual if number < 11 else new for number in range(18)))
    return replace(whole, chunks=tuple(chunk for number, chunk in enumerate(whole.chunks) if number >= 11 - before))


def start_of(monday: Any) -> int:  # noqa: ANN401 - of a module that is loaded by its path
    return int(datetime(monday.year, monday.month, monday.day, tzinfo=UTC).timestamp())


def week_of(start_seconds: int) -> Window:
    return Window(start_seconds=start_seconds, end_seconds=start_seconds + WEEK_SECONDS)


WEEK = week_of(start_of(MONDAY))


def report(known: FleetLedger, window: Window, *by: Dimension) -> Document:
    """Return the report of a week in the form that the program reads."""
    chunks = tuple(chunk for chunk in known.chunks if window.meets(chunk.window))
    failures = tuple(failure for failure in known.failures if window.meets(failure.window))
    of_week = replace(known, window=window, chunks=chunks, failures=failures)
    found: Document = json.loads(json.dumps(document(make_report(of_week, Question(by=by)))))
    return found


def advice(number: int, *, money: float | None = 100.0, workload: str = "resnet") -> Document:
    return recommendation_document(
        Recommendation(
            advice="give-back",
            owner=LineKey(
                namespace="vision", kind="Job", workload=workload, team="core", model="NVIDIA H100 80GB HBM3"
            ),
            title=f"Give back {number} of 8 H100",
            gpus=float(number),
            currency="" if money is None else "USD",
            per_month=money,
            evidence=("It was idle.",),
            risk="It may be needed.",
            risk_level="low",
        )
    )


def budget(name: str, spent: float | None, *, projected: float | None = None) -> Document:
    return {
        "name": name,
        "currency": "USD",
        "amount": 1000.0,
        "period": "week",
        "from_seconds": WEEK.start_seconds,
        "spent": spent,
        "projected": projected,
        "passed": [part for part in (0.5, 0.8, 1.0) if spent is not None and spent >= part * 1000.0],
        "notes": [] if spent is not None else ["3 queries about the period failed."],
    }


ADVICE = (advice(3), advice(1, money=None, workload=MARKUP))
BUDGETS = (
    budget("calm", 100.0, projected=600.0),
    budget("over", 1200.0, projected=2000.0),
    budget("soon", 400.0, projected=1500.0),
    budget("dark", None),
)


def bare(known: FleetLedger, **more: object) -> Digest:
    before = report(known, week_of(WEEK.start_seconds - WEEK_SECONDS), "team")
    owners = report(known, WEEK, "cluster", "namespace", "workload", "team")
    return digest.make(MONDAY, report(known, WEEK, "team"), owners, before, **more)


def made(
    known: FleetLedger | None = None,
    recommendations: tuple[Document, ...] | None = ADVICE,
    budgets: tuple[Document, ...] = BUDGETS,
    notes: tuple[str, ...] = ("A note <b>of</b> the engine.",),
) -> Digest:
    simulated = replace(known or weeks(), simulated=True)
    return bare(simulated, advice=recommendations, budgets=budgets, notes=notes, external_url=f"{PAGE}/")


def section(of: Digest, title: str) -> Section:
    return next(one for one in digest.sections(of) if one.title.startswith(title))


def texts(of: Section) -> list[tuple[str, ...]]:
    return [row.texts for row in of.rows]


@pytest.mark.parametrize(
    ("written", "label", "start"),
    [
        ("lastweek", "2026-W42", 1_791_763_200),
        ("2026-W41", "2026-W41", 1_791_158_400),
        ("2026W01", "2026-W01", 1_766_966_400),
        ("2020-W53", "2020-W53", 1_609_113_600),
    ],
)
def test_week_runs_from_monday_to_sunday_utc(written: str, label: str, start: int) -> None:
    monday = digest.parse_week(written, NOW)
    assert (digest.label(monday), start_of(monday)) == (label, start)


@pytest.mark.parametrize("written", ["2026-W43", "2026-W54", "2026-W00", "7d", "", "0001-W01", "9999-W01", "2026-W4\n"])
def test_invalid_or_unfinished_week_is_refused(written: str) -> None:
    with pytest.raises(digest.UsageError, match="allowed: lastweek, or a complete week such as 2026-W46"):
        digest.parse_week(written, NOW)


def test_spend_is_per_currency_and_its_parts_add_up() -> None:
    rows = {title: money for title, money, *_ in texts(section(made(), "Spend"))}
    assert (rows["Total EUR"], rows["Total USD"]) == ("420.00 EUR", "3,024.00 USD")
    assert (rows["Unattributed"], rows["Unallocated, without a holder"]) == ("84.00 USD", "280.00 USD")
    parts = [(title, money) for title, money in rows.items() if "Total" not in title and money.endswith("USD")]
    assert sum(float(money.removesuffix(" USD").replace(",", "")) for _, money in parts) == 3024.0
    before = made().before
    assert {one["currency"]: one["cost"] for one in before["total"]["money"]} == {"USD": pytest.approx(7 * 480.0)}


def test_funnel_covers_the_fleet_and_teams_and_shows_unprofiled_as_such() -> None:
    rows = {tuple(row[:2]): row[2:] for row in texts(section(made(), "From paid to effective"))}
    assert rows["All", "USD"] == ("3,024.00", "2,660.00", "1,708.00", "1,344.00", "336.00")
    assert rows["core", "GPU-hours"] == ("504.00", "504.00", "420.00", "336.00", "84.00")
    assert rows["research", "USD"] == ("336.00", "336.00", "28.00", "not profiled", "not profiled")
    assert rows[MARKUP, "EUR"] == ("420.00", "420.00", "0.00", "-", "-")


def test_team_changes_are_sorted_by_size_and_include_removed_teams() -> None:
    more = [row[:2] for row in texts(section(made(), "Teams that cost more"))]
    assert more == [(MARKUP, "+420.00 EUR"), ("core", "+672.00 USD"), ("(no team)", "+308.00 USD")]
    less = [row[:2] for row in texts(section(made(), "Teams that cost less"))]
    assert less == [("gone", "-672.00 USD"), ("research", "-336.00 USD")]


def test_waste_names_the_owner_and_the_idle_cost() -> None:
    rows = texts(section(made(), "Waste"))
    dearest = next(row for row in rows if row[2].endswith("USD"))
    assert dearest == ("Job vision/resnet", "core", "336.00 USD", "16 %", "84.0")
    assert not any(UNALLOCATED in row[0] or UNATTRIBUTED in row[0] for row in rows)


def test_incomplete_previous_week_is_not_compared() -> None:
    for before, words in ((6, "only 288 of 336 hours were recorded"), (0, "because it has no data")):
        shown = made(weeks(before=before))
        assert shown.before is None
        assert "Teams that" not in digest.as_text(shown)
        assert {before for title, *_, before in texts(section(shown, "Spend")) if "Total" in title} == {"unknown"}
        assert "against the week before" not in digest.headline(shown)
        assert any(words in note for note in shown.notes), shown.notes
    failure = Failure(window=replace(WEEK, start_seconds=WEEK.start_seconds - 3600), what="x", reason="timeout")
    shown = made(replace(weeks(), failures=(failure,)))
    assert shown.before is None
    assert not digest.is_whole(shown.teams)
    assert "timeout" in digest.as_text(shown)


def test_budgets_over_a_threshold_are_listed_and_others_counted() -> None:
    shown = digest.as_text(made())
    assert "1 of 4 below every threshold and projection." in shown
    assert re.search(r"over +2026-W42 +1,200.00 USD, 120 % +1,000.00 USD +2,000.00 USD", shown)
    assert re.search(r"soon +2026-W42 +400.00 USD, 40 %", shown)
    assert re.search(r"dark +2026-W42 +unknown", shown)
    assert not re.search(r"^calm", shown, re.MULTILINE)
    assert "dark: 3 queries about the period failed." in shown


def test_digest_without_prices_advice_or_page_reports_their_absence() -> None:
    free = bare(weeks(after={owner("a", "b"): hours(active=24.0, unpriced=24.0)}, before=0))
    shown = digest.as_text(free)
    assert digest.headline(free) == "GPU cost, 2026-W42: no GPU had a price"
    assert "No owner had idle cost." in shown
    assert "Recommendations are unknown" in shown
    assert "168.0 GPU-hours without a price" in shown
    assert "http" not in shown + digest.as_html(free) + digest.as_slack(free)
    assert "SIMULATED" not in shown
    assert "No recommendations." in digest.as_text(made(recommendations=()))


@pytest.mark.parametrize(
    ("form", "make"), [("txt", digest.as_text), ("html", digest.as_html), ("json", digest.as_slack)]
)
def test_every_format_matches_its_golden_file(form: str, make: Callable[[Digest], str]) -> None:
    shown = make(made())
    path = GOLDEN / f"digest.{form}"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), "after an intended change: UPDATE_GOLDEN=1 pytest -k golden"


def test_every_format_has_the_simulated_notice_and_the_cost() -> None:
    week = made()
    for make in digest.FORMS.values():
        shown = make(week)
        assert "SIMULATED FLEET: nothing here is real" in shown
        assert "3,024.00 USD" in shown
        assert "-10.0 % against the week before" in shown


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"href", "src"}]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_mail_loads_nothing_and_escapes_names() -> None:
    page = _Page()
    page.feed(digest.as_html(made()))
    assert not {"script", "img", "link", "style", "iframe", "form"} & set(page.tags)
    assert MARKUP in page.words
    assert "\u202e" not in page.words
    assert page.links
    assert all(link.startswith(f"{PAGE}/") for link in page.links)


def test_chat_message_escapes_mentions_and_links_in_names() -> None:
    sent = digest.message(made())
    reported = json.dumps(sent, ensure_ascii=False)
    assert "<!channel>" not in reported
    assert "<script>" not in reported
    assert "&lt;!channel&gt;&amp;'*_~|" in reported
    for link in re.findall(r"<([^>]*)>", reported):
        assert link.startswith(f"{PAGE}/"), link
    owners = [link for link in re.findall(r"<([^|>]*)\|open>", reported) if "cluster=east" in link]
    assert owners[0].startswith(f"{PAGE}/owner?window=2026-10-12..2026-10-18&amp;cluster=east&amp;namespace=lab")


def test_message_stays_within_slack_limits_for_long_names() -> None:
    many: Lines = {
        owner(f"{'&' * 300}{number}", f"{'<' * 500}{number}", f"{'é' * 300}{number}"): hours(
            idle=1.0 + number, usd=10.0
        )
        for number in range(60)
    }
    notes = tuple(f"{number} {'>' * 5000}" for number in range(30))
    recommendations = tuple(advice(number, workload="&" * 400) for number in range(40))
    budgets = tuple(budget(f"{'&' * 300}{number}", 2000.0) for number in range(40))
    sent = digest.message(made(weeks(after=many), recommendations, budgets, notes))
    assert len(sent["blocks"]) <= digest.MOST_BLOCKS
    for block in sent["blocks"]:
        for one in (block.get("text"), *block.get("elements", ())):
            if one is not None:
                assert 0 < len(one["text"]) <= (150 if block["type"] == "header" else 3000)
    assert len(json.dumps(sent)) < 200_000


@asynccontextmanager
async def webhook(*answers: web.Response | None) -> AsyncIterator[tuple[str, list[object]]]:
    """Run a webhook that gives these answers in turn; yield its address and the requests."""
    got: list[object] = []

    async def take(request: web.Request) -> web.StreamResponse:
        got.append(await request.json())
        answer = answers[min(len(got), len(answers)) - 1]
        if answer is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.Response(status=answer.status, text=answer.text, headers=answer.headers)

    app = web.Application()
    app.router.add_post("/services/{path:.*}", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/services/{TOKEN}", got
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


async def test_busy_webhook_is_retried_after_retry_after() -> None:
    slept: list[float] = []
    busy = web.Response(status=429, headers={"Retry-After": "7"})
    async with webhook(busy, web.Response(status=503), web.Response(text="ok")) as (url, got):
        await asyncio.to_thread(digest.post, url, digest.message(made()), slept.append)
    assert slept == [7.0, 2.0]
    assert len(got) == 3
    assert got[0] == digest.message(made())


@pytest.mark.parametrize(
    ("answer", "attempts", "reported"),
    [
        (web.Response(status=500), digest.ATTEMPTS, "after 5 attempts: HTTP 500"),
        (web.Response(status=404, text="no_service"), 1, "HTTP 404 (no_service); check that the address is that of"),
        (web.Response(status=400, text=f"invalid_blocks at /services/{TOKEN}"), 1, "(invalid_blocks at ...)"),
        (web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"}), 1, "HTTP 302"),
        (web.Response(status=429, headers={"Retry-After": "86400"}), digest.ATTEMPTS, "HTTP 429"),
        (None, 1, "the connection broke"),
    ],
)
async def test_failed_webhook_is_reported_without_its_secret(
    answer: web.Response | None, attempts: int, reported: str
) -> None:
    slept: list[float] = []
    async with webhook(answer) as (url, got):
        with pytest.raises(
            digest.DigestError, match=r"the webhook at 127\.0\.0\.1 did not accept the digest"
        ) as refused:
            await asyncio.to_thread(digest.post, url, digest.message(made()), slept.append)
    assert len(got) == attempts
    assert reported in str(refused.value)
    assert "very-secret" not in str(refused.value)
    assert max(slept, default=0.0) <= 60.0


def test_unreachable_webhook_is_reported_without_its_secret() -> None:
    with pytest.raises(digest.DigestError) as refused:
        digest.post(f"http://127.0.0.1:9/{TOKEN}", {}, lambda _: None)
    assert "cannot be reached" in str(refused.value)
    assert "very-secret" not in str(refused.value)


@pytest.mark.parametrize(
    "content", ["", "secret-xyz", "ftp://secret-xyz", "https://", "https://a b/secret-xyz", "\xff"]
)
def test_url_file_without_an_address_is_reported_without_its_content(content: str, tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(digest.UsageError, match="expected: one line with an address") as refused:
        digest.read_url(path)
    assert "secret-xyz" not in str(refused.value)


def money_of(truth: FleetTruth, currency: str) -> float:
    return truth.sum().money[currency].total


@pytest.fixture(autouse=True, scope="module")
def _installed() -> Iterator[None]:
    """Install the program: it imports `gpu-cost-exporter` by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        yield


@pytest.fixture(scope="module")
def asked(fleet_prometheus: FleetServer) -> str:
    """Return the digest of a week as text, from Prometheus."""
    output = io.StringIO()
    with redirect_stdout(output):
        assert digest.main(["--prometheus", fleet_prometheus.url, *WEEK_38]) == 0
    return output.getvalue()


@pytest.fixture(scope="module")
def store(fleet_prometheus: FleetServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the days of the week and of the one before it."""
    path = tmp_path_factory.mktemp("store") / "days.sqlite"
    start = start_of(digest.parse_week("2026-W38", NOW))

    async def close() -> None:
        async with PrometheusClient(PrometheusSettings(url=fleet_prometheus.url)) as client:
            ledger = PrometheusLedger(client)
            with DayStore(path).writing(0.0) as writing:
                await close_due_days(writing, ledger, END_SECONDS, from_day=start - WEEK_SECONDS, accept_gaps=True)

    asyncio.run(close())
    return path


async def test_fleet_digest_has_the_true_cost(fleet_prometheus: FleetServer) -> None:
    monday = digest.parse_week("lastweek", END_SECONDS)
    start = start_of(monday)
    source = digest.Commands(flags=("--prometheus", fleet_prometheus.url))
    week = await asyncio.to_thread(digest.read, source, monday)
    truth, before = (truth_between(start - back, start + WEEK_SECONDS - back) for back in (0, WEEK_SECONDS))
    for known, read in ((truth, week.teams), (before, week.before)):
        for currency in ("EUR", "USD"):
            assert digest.total(read, currency) == pytest.approx(money_of(known, currency), rel=1e-6)
    assert digest.currencies(week) == ["EUR", "USD"]
    assert digest.is_whole(week.teams)
    assert week.teams["simulated"]
    assert week.advice


async def test_command_posts_once_and_dry_run_posts_nothing(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "url"
    async with webhook(web.Response(text="ok")) as (url, got):
        path.write_text(f"{url}\n")
        words = ["--store", str(store), *WEEK_38, "--webhook-url-file", str(path)]
        assert await asyncio.to_thread(digest.main, [*words, "--dry-run"]) == 0
        dry = capsys.readouterr()
        assert got == []
        assert "not posted because of --dry-run; target: 127.0.0.1" in dry.err
        assert await asyncio.to_thread(digest.main, words) == 0
        posted = capsys.readouterr()
    assert got == [json.loads(dry.out)]
    assert posted.out == ""
    assert "the digest of 2026-W38 was posted to 127.0.0.1" in posted.err
    assert "very-secret" not in dry.err + dry.out + posted.err


def test_command_writes_text_and_mail(asked: str, store: Path, tmp_path: Path) -> None:
    assert "Waste: GPUs held without work" in asked
    mail = tmp_path / "mail.html"
    words = ("--format", "html", "--title", "Räume", "--output", str(mail))
    assert digest.main(["--store", str(store), *WEEK_38, *words]) == 0
    assert "<h1" in mail.read_text(encoding="utf-8")
    assert "Räume, 2026-W38" in mail.read_text(encoding="utf-8")


def test_week_without_data_is_a_failure(fleet_prometheus: FleetServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert digest.main(["--prometheus", fleet_prometheus.url, "--week", "2025-W10"]) == 1
    assert "there is no ledger in this period" in capsys.readouterr().err


def test_all_flag_errors_are_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "url"
    path.write_text("no address")
    wrong = ["--week", "7d", "--webhook-url-file", str(path), "--format", "html", "--external-url", "x"]
    assert digest.main([*wrong, "--output", str(tmp_path / "o"), "--service", "y", "--store", "z"]) == 2
    errors = capsys.readouterr().err
    for words in (
        "--week: value '7d' is not a week",
        "is not an address",
        "a webhook accepts only slack, not html",
        "--output: has no effect with --webhook-url-file",
        "--external-url: value 'x'",
        "--service: value 'y'",
        "--service: has its own sources",
    ):
        assert words in errors, words
    for words, problem in (
        (["--store", "x", "--dry-run"], "--dry-run: has no effect without"),
        ([], "digest: no source given"),
        (["--prometheus", "http://127.0.0.1:9", "--sealed"], "--sealed: unknown flag"),
    ):
        assert digest.main(words) == 2
        assert problem in capsys.readouterr().err


def test_documented_cron_job_runs_an_existing_command() -> None:
    root = Path(__file__).parent.parent
    page = (root / "contrib" / "digest" / "README.md").read_text(encoding="utf-8")
    (manifest,) = re.findall(r"```yaml\n(apiVersion: batch/v1.*?)```", page, re.DOTALL)
    job = read_yaml(manifest)
    dockerfile = (root / "Dockerfile").read_text(encoding="utf-8")
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert f"podman push {container['image']}\n" in (root / "docs" / "install.md").read_text(encoding="utf-8")
    user = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"\nUSER {user}:" in dockerfile
    program = Path(container["command"][-1])
    assert f" contrib/digest/{program.name} {program.parent}/\n" in dockerfile.partition(" AS runtime\n")[2]
    assert "\nFROM runtime AS service\n" in dockerfile
    arguments, others = digest.flags_of_program().parse_known_args(container["args"])
    assert (arguments.webhook_url_file, others) == (Path("/secrets/url"), [])
    options = set(re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE))
    assert options
    assert {name.replace("_", "-") for name in vars(arguments)} >= {option.removeprefix("--") for option in options}


def test_store_alone_gives_the_same_cost_and_reports_missing_sections(
    asked: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert digest.main(["--store", str(store), *WEEK_38]) == 0
    kept = capsys.readouterr().out
    assert kept.partition("What to do")[0] == asked.partition("What to do")[0]
    assert "Recommendations need --prometheus: the store has no data on the use of devices." in kept


async def test_service_gives_the_same_cost_and_the_budgets(
    fleet_prometheus: FleetServer, asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "budgets.yaml"
    file.write_text("budgets: [{name: all, amount: 0.01, currency: USD, period: month}]\n")
    async with running(fleet_prometheus.url, budgets=str(file)) as service:
        assert await service.round()
        words = ["--service", service.url, *WEEK_38]
        assert await asyncio.to_thread(digest.main, words) == 0
        served = capsys.readouterr().out
    assert served.partition("What to do")[0] == asked.partition("What to do")[0]
    assert re.search(r"^all +2026-09 +[0-9,.]+ USD, [0-9]+ % +0.01 USD", served, re.MULTILINE), served
    assert await asyncio.to_thread(digest.main, words) == 1
    assert "no response of a cost service" in capsys.readouterr().err
