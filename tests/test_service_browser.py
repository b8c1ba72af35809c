"""The cost service's pages in a real browser: they render, load nothing from other hosts, and are accessible.

``SCREENSHOTS=1 pytest tests/test_service_browser.py -k screenshots`` puts new pictures into the documentation.
``page.png`` is the agent's page of ``make demo`` after 16 minutes, 1280 by 1480 pixels.
"""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from fleet_support import FleetServer, backfill, prometheus
from playwright.sync_api import Browser, BrowserContext, Page, Request, ViewportSize, sync_playwright
from service_support import Served, in_thread, served

from exporter.cost.budgets import Budget
from gpu_simulator.fleet_plan import FleetPlan

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
MOST_IMAGE_BYTES = 200_000
WINDOW: ViewportSize = {"width": 1280, "height": 900}
TABLES = ("team", "namespace", "workload", "model", "pool", "cluster", "node")
PAGES = (
    "/",
    *(f"/by/{name}" for name in TABLES),
    "/owner?team=vision",
    "/owner?namespace=vision",
    "/recommendations",
    "/budgets",
    "/about",
    "/api",
    "/runbook",
)
FILTERED = (
    "/?window=7d&cluster=alpha",
    "/?team=vision&currency=EUR",
    "/by/team?columns=funnel",
    "/by/workload?namespace=vision&sort=-idle&q=notebook",
    "/by/model?share=weighted&shareUnallocated=true",
    "/by/team?team=nobody",
    "/by/label:project?label:environment=dev&share=even",
    "/by/workload?share=even&shareUnallocated=true",
    "/?window=2020-01",
)
AXED = (
    "/",
    "/by/team",
    "/by/workload?share=even&team=vision&q=serving",
    "/by/team?window=2020-01",
    "/owner?namespace=vision-dev&currency=USD",
    "/recommendations",
    "/budgets",
    "/about",
    "/api",
    "/runbook",
)
"""Each template once, with and without figures; ``axe`` is slow for tables of a hundred rows."""
AXE: tuple[tuple[Literal["light", "dark"], dict[str, object]], ...] = (
    ("light", {"resultTypes": ["violations"]}),
    # The dark scheme differs in colours only.
    ("dark", {"resultTypes": ["violations"], "runOnly": ["color-contrast", "link-in-text-block"]}),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs chromium on the PATH: make install")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Make the context of all tests once: it is slow."""
    made = browser.new_context(viewport=WINDOW, color_scheme="light")
    yield made
    made.close()


@pytest.fixture(scope="module")
def service(fleet_prometheus: FleetServer, small_fleet: FleetPlan) -> Iterator[Served]:
    now = small_fleet.end_seconds + 1500.0
    budgets = [
        Budget(name="Vision", currency="USD", amount=24_000.0, period="month", owner={"team": "vision"}),
        Budget(name="Search", currency="USD", amount=30_000.0, period="month", owner={"team": "search"}),
        Budget(name="Ads, this quarter", currency="USD", amount=12_000.0, period="quarter", owner={"team": "ads"}),
    ]
    with in_thread(served(fleet_prometheus.url, now, recommendations=None, budgets=budgets)) as running:
        yield running


class Watched:
    """A page that records its console and requests."""

    def __init__(self, context: BrowserContext, home: str) -> None:
        self.page = context.new_page()
        self.home = home
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", lambda message: self._said(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._asked)

    def _said(self, kind: str, text: str) -> None:
        if kind in {"error", "warning", "trace"}:
            self.complaints.append(text)

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((self.home, "data:", "blob:")):
            self.elsewhere.append(request.url)

    def open(self, path: str) -> Page:
        """Go to a page."""
        answer = self.page.goto(self.home + path, wait_until="load", timeout=120_000)
        assert answer is not None
        assert answer.ok, f"{path}: {answer.status}"
        return self.page

    def check(self) -> None:
        """Assert that there was no console message and no request to another host since the last check."""
        seen = (self.complaints[:], self.elsewhere[:])
        self.complaints.clear()
        self.elsewhere.clear()
        assert seen == ([], [])


@contextmanager
def watched(context: BrowserContext, service: Served) -> Iterator[Watched]:
    seen = Watched(context, service.url)
    try:
        yield seen
    finally:
        seen.page.close()


@pytest.fixture(scope="module")
def tab(context: BrowserContext, service: Served) -> Iterator[Watched]:
    """Open one tab for all pages: each new tab is a process."""
    with watched(context, service) as seen:
        yield seen


def cut_at_any_width(page: Page) -> list[str]:
    """Return the cut text in windows of phone to desktop width; no page may be wider than its window."""
    found: list[str] = []
    for width in (360, 768, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width, timeout=10_000)
        cut = page.evaluate(
            """() => [...document.querySelectorAll('td.num, .tile dd, .gain')].filter((one) => {
                const panel = one.closest('.panel, .tile'), scroll = one.closest('.scroll');
                return panel && !scroll && one.getClientRects().length
                    && one.getBoundingClientRect().right > panel.getBoundingClientRect().right + 1;
            }).map((one) => one.textContent)"""
        )
        found += [f"{text} at {width}" for text in cut]
    page.set_viewport_size(WINDOW)
    return found


def faults_for_axe(page: Page) -> list[str]:
    """Return the serious faults in axe's report, in light and dark, with everything unfolded."""
    found: list[str] = []
    page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
    for scheme, rules in AXE:
        page.emulate_media(color_scheme=scheme)
        for fault in Axe().run(page, options=rules).response["violations"]:
            if fault["impact"] in {"serious", "critical"}:
                nodes = [node["html"][:120] for node in fault["nodes"][:3]]
                found.append(f"{scheme}: {fault['id']}: {fault['help']}: {nodes}")
    page.emulate_media(color_scheme="light")
    return found


@pytest.mark.parametrize("path", dict.fromkeys((*PAGES, *FILTERED, *AXED)))
def test_page_draws_fits_every_width_and_loads_nothing_external(tab: Watched, path: str) -> None:
    page = tab.open(path)
    assert page.locator("h1").count() == 1
    assert page.locator(".plot .bars").count() == page.locator("[data-chart]").count()
    assert cut_at_any_width(page) == []
    tab.check()
    if path in AXED:
        assert faults_for_axe(page) == []


@pytest.mark.parametrize(("path", "status"), [("/by/nobody", 404), ("/?window=nonsense", 400)])
def test_error_page_is_accessible(tab: Watched, path: str, status: int) -> None:
    answer = tab.page.goto(tab.home + path, wait_until="load")
    assert answer is not None
    assert answer.status == status
    assert cut_at_any_width(tab.page) == []
    assert faults_for_axe(tab.page) == []
    tab.complaints.clear()  # the browser's own message about the status


def test_every_link_of_every_page_has_a_target(service: Served) -> None:
    links: set[str] = set()
    for path in PAGES:
        found = re.findall(r'<a [^>]*href="([^"#]+)', read(service, path))
        links |= {unescape(link) for link in found}
    kinds: dict[tuple[str, str], str] = {}
    for link in sorted(links):
        path, _, query = link.partition("?")
        kinds.setdefault((path, ",".join(sorted(re.findall(r"(\w+)=", query)))), link)
    assert len(kinds) > 30
    for link in kinds.values():
        read(service, link)


def read(service: Served, path: str) -> str:
    """Return the body of a page."""
    with urllib.request.urlopen(service.url + path, timeout=120) as answer:  # noqa: S310 - our own server
        return str(answer.read().decode())


def test_the_pages_work_without_scripts(browser: Browser, service: Served) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(f"{service.url}/by/team")
        page.get_by_role("link", name="vision", exact=True).click()
        assert page.get_by_role("heading", level=1).inner_text() == "Team vision"
        page.get_by_text("Figures as a table").click()
        assert page.get_by_role("rowheader", name="2026-09-20").is_visible()
    finally:
        context.close()


def test_filters_are_set_and_removed_by_form_and_link(context: BrowserContext, service: Served) -> None:
    with watched(context, service) as seen:
        page = seen.open("/by/namespace")
        page.get_by_text("Filters").click()
        page.get_by_label("Team").fill("vision")
        page.get_by_label("Period", exact=True).select_option("7d")
        page.get_by_label("Share unallocated").select_option("weighted")
        page.get_by_role("button", name="Apply").click()
        page.wait_for_url("**/by/namespace?**")
        assert set(page.url.partition("?")[2].split("&")) == {"window=7d", "team=vision", "share=weighted"}
        assert page.get_by_role("columnheader", name="Shared USD").is_visible()
        page.get_by_role("link", name="Team vision").click()
        page.wait_for_url(lambda url: "team=" not in url)
        assert page.get_by_role("rowheader", name="search", exact=True).is_visible()
        page.get_by_text("Filters").click()
        page.get_by_label("First day").fill("2026-09-10")
        page.get_by_label("Last day").fill("2026-09-12")
        page.get_by_role("button", name="Apply").click()
        page.wait_for_url("**window=2026-09-10..2026-09-12*")
        page.get_by_text("Filters").click()
        assert page.get_by_label("First day").input_value() == "2026-09-10"
        page.get_by_label("Period", exact=True).select_option("30d")
        page.get_by_role("button", name="Apply").click()
        page.wait_for_url("**window=30d*")
        seen.check()


def test_a_table_is_sorted_searched_and_paged_by_links(context: BrowserContext, service: Served) -> None:
    with watched(context, service) as seen:
        page = seen.open("/by/workload")
        page.get_by_role("link", name="Unknown", exact=True).click()
        page.wait_for_url("**sort=-unknown*")
        assert page.locator("th[aria-sort=descending]").inner_text().startswith("Unknown")
        page.get_by_role("link", name="Next").click()
        page.wait_for_url("**page=2*")
        assert "shown 101 to 200" in page.locator("#table h2").inner_text()
        page.get_by_label("Search names").fill("notebook")
        page.get_by_role("button", name="Search").click()
        page.wait_for_url("**q=notebook*")
        assert "page=" not in page.url
        assert all("otebook" in name for name in page.locator("table.report tbody th").all_inner_texts())
        seen.check()


def test_downloads_are_files_with_the_shown_figures(context: BrowserContext, service: Served, tmp_path: Path) -> None:
    with watched(context, service) as seen:
        page = seen.open("/by/team?window=2026-09&cluster=alpha")
        total = page.locator("tr.total td").first.inner_text()
        for form in ("CSV", "JSON", "HTML", "FOCUS"):
            with page.expect_download() as waiting:
                page.get_by_role("link", name=form, exact=True).click()
            file = tmp_path / form
            waiting.value.save_as(file)
            assert waiting.value.suggested_filename.endswith(".csv" if form == "FOCUS" else f".{form.lower()}")
            assert waiting.value.suggested_filename.startswith(("gpu-cost-", "focus-")), form
            assert file.stat().st_size > 200, form
        document = json.loads((tmp_path / "JSON").read_text(encoding="utf-8"))
    assert f"{sum(line['allocated_seconds'] for line in document['lines']) / 3600:,.0f}" == total


def test_keyboard_navigation_reaches_an_owner_page_from_the_skip_link(context: BrowserContext, service: Served) -> None:
    with watched(context, service) as seen:
        page = seen.open("/by/team")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "content"
        for _ in range(60):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                """() => { const one = document.activeElement, ring = getComputedStyle(one);
                    return [one.getAttribute('href') || '', ring.outlineStyle, ring.outlineWidth]; }"""
            )
            assert focused[1:] == ["solid", "2px"], focused
            if focused[0].startswith("/owner"):
                break
        page.keyboard.press("Enter")
        page.wait_for_url("**/owner?*")
        assert page.get_by_role("heading", level=1).inner_text().startswith("Team ")


def test_charts_follow_the_colour_scheme(context: BrowserContext, service: Served) -> None:
    with watched(context, service) as seen:
        page = seen.open("/")
        colour = "getComputedStyle(document.querySelector('.plot .bars text')).fill"
        light = page.evaluate(colour)
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(colour) != light
        seen.check()


def test_chart_tooltip_shows_the_day_and_its_total(context: BrowserContext, service: Served) -> None:
    with watched(context, service) as seen:
        page = seen.open("/?currency=USD")
        page.locator(".plot .bars").hover()
        tip = page.locator(".tip")
        assert tip.is_visible()
        words = tip.locator("dt").all_inner_texts()
        assert words[0] == "Effective"
        assert words[-1] == "Total USD"
        day = tip.locator("b").inner_text()
        page.get_by_text("Figures as a table").click()
        row = page.locator("#d-uses tr", has_text=day).locator("td").all_inner_texts()
        assert tip.locator("dd").all_inner_texts() == row
        seen.check()


TEAMS = tuple(f"team-{number}" for number in range(20))
MARKUP = ('<a href="https://evil.example/login" target="_top">Log in again</a>', "<b>ml</b>", "ml", "a<br>b &lt;i&gt;")


def many_owners(directory: Path, end_seconds: int, count: int, teams: Sequence[str] = TEAMS) -> Path:
    """Make blocks with an hour of many workloads, one per GPU."""
    text = directory / "many.om"
    where = 'model="NVIDIA L4",workload_kind="Job"'
    with text.open("w", encoding="utf-8") as output:
        output.write("# TYPE workload:gpu_ledger:delta1h gauge\n")
        for quantity, value, more in (("seconds", 1800, ""), ("cost", 0.25, ',currency="USD"')):
            output.writelines(
                f'workload:gpu_ledger:delta1h{{quantity="{quantity}",{where},workload_namespace="ns-{number % 50}",'
                f'workload_name="job-{number}",team={json.dumps(teams[number % len(teams)])},state="{state}"{more}}}'
                f" {value} {end_seconds}\n"
                for number in range(count)
                for state in ("active_unprofiled", "idle")
            )
        output.write("# TYPE cluster:gpu_capacity_seconds:delta1h gauge\n")
        output.write(f"cluster:gpu_capacity_seconds:delta1h {3600 * count} {end_seconds}\n# EOF\n")
    backfill(text, directory / "blocks")
    return directory / "blocks"


def test_ten_thousand_owners_are_paged_by_one_hundred(
    context: BrowserContext, tmp_path: Path, small_fleet: FleetPlan
) -> None:
    end = small_fleet.end_seconds
    blocks = many_owners(tmp_path, end, 10_000)
    with (
        prometheus(tmp_path, blocks, small_fleet) as server,
        in_thread(served(server.url, end + 1500.0)) as running,
        watched(context, running) as seen,
    ):
        for path in ("/by/workload", "/by/workload?page=57", "/by/workload?q=job-77", "/"):
            began = time.monotonic()
            page = seen.open(path)
            size = len(page.content())
            print(f"{path}: {time.monotonic() - began:.2f} s to the page, {size / 1000:,.0f} kB of DOM")  # noqa: T201 - it is the point
            assert page.locator("table.report tbody tr").count() <= 100
        page = seen.open("/by/workload?page=100")
        assert "10,000, shown 9,901 to 10,000" in page.locator("#table h2").inner_text()
        seen.check()


def test_chart_shows_names_with_markup_as_text(context: BrowserContext, tmp_path: Path, small_fleet: FleetPlan) -> None:
    blocks = many_owners(tmp_path, small_fleet.end_seconds, len(MARKUP), MARKUP)
    with (
        prometheus(tmp_path, blocks, small_fleet) as server,
        in_thread(served(server.url, small_fleet.end_seconds + 1500.0)) as running,
        watched(context, running) as seen,
    ):
        page = seen.open("/by/team")
        legend = page.locator(".legend .key").all_text_contents()
        page.locator(".plot .bars").hover()
        hover = page.locator(".tip dt").all_text_contents()
        assert page.locator(".chart a, .chart i").count() == 0
        seen.check()
    assert set(MARKUP) <= set(legend)
    assert set(MARKUP) <= set(hover)


def test_documentation_screenshots_are_made_and_small(context: BrowserContext, service: Served, tmp_path: Path) -> None:
    images = IMAGES if os.environ.get("SCREENSHOTS") else tmp_path
    with watched(context, service) as seen:
        table = seen.open("/by/workload?sort=-idle-cost")
        href = table.locator("table.report tbody th a").first.get_attribute("href")
        for name, path in (("overview", "/"), ("workload", str(href)), ("recommendations", "/recommendations")):
            page = seen.open(path)
            for evidence in page.locator(".advice summary").all()[:1]:
                evidence.click()
            file = images / f"cost-{name}.png"
            page.screenshot(path=file, full_page=True)
            if packer := shutil.which("pngquant"):
                subprocess.run([packer, "--force", "--ext=.png", "--speed=1", "128", file], check=True)
                assert file.stat().st_size < MOST_IMAGE_BYTES, file
