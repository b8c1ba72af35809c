"""The page: complete, escaped, true to the snapshot, and usable without script, colour or mouse."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import page_support as made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.model import formatting
from exporter.model.attribution import AllocationState, Owner, PodFacts
from exporter.model.devices import SourceState, SourceStatus
from exporter.model.snapshot import ActivityHistory, Snapshot
from exporter.web import node_page

VOID = {"meta", "link", "rect", "br", "input", "path"}
ROOT = Path(__file__).resolve().parents[1]
EVIL = "<script>alert('x')</script>\" onload='&"


class Tags(HTMLParser):
    """Checks that elements nest, and collects ids, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.words: list[str] = []
        self.labels: list[str] = []
        self.scopes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "th":
            self.scopes.append((tag, found.get("scope")))
        self.labels += [str(found["aria-label"])] if found.get("role") == "img" else []
        self.links += [str(found[name]) for name in ("href", "src") if found.get(name)]
        self.attributes |= set(found)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"rect", "path"}
        self.attributes |= set(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(snapshot: Snapshot | None, *, whole: bool = False, cost_service_url: str = "") -> Tags:
    tags = Tags()
    tags.feed(node_page.document(snapshot, cost_service_url, is_whole=whole))
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    return tags


def test_page_shows_holders_and_their_idle_time() -> None:
    text = read(made.rich_snapshot()).text
    for words in (
        "gpu-node-a",
        "driver 570.124.06",
        "research/ notebook-anna",
        "idle for 2 h 13 min",
        "7 of 8",
        "MIG · 5 of 7 instances held",
        "3 holders · 75 % of it held",
        "lost: fell off the bus",
        "Xid 79",
        "unattributed no listed pod 1 process",
        "node-a/gpu-9 : dra unresolved",
    ):
        assert words in text


def test_simulated_node_is_marked_at_the_top_and_in_the_title_only() -> None:
    simulated, real = node_page.document(made.rich_snapshot()), node_page.document(made.snapshot(made.held(0, "a")))
    assert "SIMULATED NODE — nothing here is real" in simulated
    assert "<title>SIMULATED GPUs of" in simulated
    assert "SIMULATED" not in real


def test_the_longest_idle_holder_comes_first() -> None:
    text = read(made.snapshot(made.held(0, "short", 0.0, 300), made.held(1, "long", 0.0, 90_000))).text
    assert text.index("idle for 25 h 0 min") < text.index("idle for 5 min")


def test_card_of_a_shared_gpu_counts_its_idle_holders() -> None:
    assert "GPU 5 62 % 1 idle 3 pods" in read(made.snapshot(made.shared(5))).text


def test_pod_idle_time_starts_when_its_last_active_device_becomes_idle() -> None:
    text = read(made.snapshot(made.held(0, "pair", 0.0, 9000), made.held(1, "pair", 0.0, 600))).text
    assert "idle for 10 min ml/ pair GPU 0, GPU 1" in text


def test_long_list_of_idle_holders_is_truncated_with_a_note() -> None:
    text = read(made.snapshot(*(made.held(index, f"pod-{index}", 0.0, 1000.0 + index) for index in range(11)))).text
    assert "idle for 16 min ml/ pod-10" in text
    assert "and 3 more, marked in the table" in text


def test_short_pause_and_unmeasured_device_are_not_listed_as_idle() -> None:
    page_html = made.fragment(made.snapshot(made.held(0, "bursty", 0.0, 60), made.held(1, "dark", None)))
    assert "Held, but idle" not in page_html
    assert "nothing on this device measures it" in page_html


def test_free_held_and_unknown_devices_are_shown_distinctly() -> None:
    unknown = made.view(1, allocation=AllocationState.UNKNOWN)
    text = read(made.snapshot(made.view(0), unknown, made.held(2, "a"))).text
    assert "free" in text
    assert "holder unknown" in text
    assert "in use" in text


def test_source_and_attribution_problems_are_shown_with_their_fix() -> None:
    broken = made.snapshot(
        sources=(SourceStatus(name="nvml", state=SourceState.FAILED, reason="driver_not_loaded", message="load <it>"),),
        attribution={"known": False, "problem": "no kubelet socket; mount it"},
        ready=False,
        not_ready_reasons=("no driver",),
    )
    text = read(broken).text
    assert "nvml failed : load <it>" in text
    assert "pods unknown" in text
    assert "no kubelet socket; mount it" in text
    assert "No devices" in text


def test_page_exists_before_the_first_snapshot() -> None:
    assert "Starting" in read(None, whole=True).text


def test_page_loads_nothing_external_and_allows_only_its_own_script() -> None:
    document = node_page.document(made.rich_snapshot())
    tags = read(made.rich_snapshot(), whole=True)
    assert all(link.startswith(("/", "#", "data:,")) for link in tags.links)
    assert "://" not in document
    assert "style" not in tags.attributes
    assert not any(name.startswith("on") for name in tags.attributes)
    for element, directive in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", document, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in node_page.CONTENT_SECURITY_POLICY


def test_page_works_without_script_and_for_screen_readers() -> None:
    document = node_page.document(made.rich_snapshot())
    tags = read(made.rich_snapshot(), whole=True)
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in document
    assert '<html lang="en">' in document
    assert "<caption>" in document
    assert all(scope in {"row", "col"} for _, scope in tags.scopes)
    assert document.count('aria-live="polite"') == 1
    assert all('aria-hidden="true"' in svg for svg in re.findall("<svg[^>]*>", document))


def test_external_text_is_escaped_everywhere() -> None:
    view = made.held(0, EVIL, namespace=EVIL)
    evil = replace(
        view,
        gpu=replace(view.gpu, model=EVIL),
        reason=EVIL,
        activity=None,
        activity_unknown_reason=EVIL,
        pods=tuple(
            replace(use, holder=replace(use.holder, container=EVIL, resource=EVIL, source=EVIL), idle_for_seconds=999.0)
            for use in view.pods
        ),
    )
    status = SourceStatus(name=EVIL, state=SourceState.HUNG, reason=EVIL, message=EVIL)
    snapshot = made.snapshot(
        evil,
        node=EVIL,
        reading={"driver_version": EVIL, "nvml_version": EVIL},
        attribution={"problem": EVIL},
        sources=(status,),
    )
    assert "<script>alert" not in made.fragment(snapshot)
    assert node_page.document(snapshot).count("<script>") == 1
    assert EVIL in read(snapshot).text
    assert "onload" not in read(snapshot).attributes, "the text does not leave the quotes of an attribute"


@given(st.text(min_size=1, max_size=20), st.text(max_size=20))
def test_arbitrary_names_do_not_break_the_page(pod: str, namespace: str) -> None:
    read(made.snapshot(made.held(0, pod, 0.0, 500, namespace=namespace), node=pod))


@pytest.mark.parametrize(
    ("seconds", "text", "brief"),
    [
        (0.4, "0 s", "0 s"),
        (119, "119 s", "119 s"),
        (120, "2 min", "2 min"),
        (7199, "119 min", "119 min"),
        (7200, "2 h 0 min", "2 h"),
        (200_000, "2 d 7 h", "2 d"),
        (-1, "0 s", "0 s"),
    ],
)
def test_durations_are_formatted_for_reading(seconds: float, text: str, brief: str) -> None:
    assert formatting.duration(seconds) == text
    assert formatting.brief(seconds) == brief


def test_low_activity_is_not_shown_as_zero() -> None:
    assert formatting.percent(0.001) == "<1 %"
    assert formatting.percent(0.0) == "0 %"


def remembering(snapshot: Snapshot, **steps: list[float | None]) -> Snapshot:
    """Add a history to the devices of a snapshot, by GPU: ``gpu_0=[0.5, None]``; steps of ten seconds, oldest first."""
    levels = {
        view.uuid: bytes(map(ActivityHistory.level, steps[f"gpu_{view.gpu.index}"]))
        for view in snapshot.devices
        if f"gpu_{view.gpu.index}" in steps
    }
    return replace(snapshot, history=ActivityHistory(ends_at_seconds=made.TAKEN_AT - 5, levels=levels))


def test_card_and_row_show_the_history_of_a_gpu_with_a_text_label() -> None:
    held = made.snapshot(made.held(0, "a", 0.0, 155.0), made.held(1, "b", 0.5))
    page_html = made.fragment(remembering(held, gpu_0=[1.0, 0.5, *[0.0] * 15], gpu_1=[0.001, None, None, 0.5]))
    # 155 s before now is 150 s, 15 steps, before the end of the newest step.
    assert page_html.count('<rect class="idle" x="75.0" width="15.0" height="40"/>') == 2
    assert page_html.count('d="M73 40V0h1V19h1V38h15V40z"') == 2
    assert page_html.count('d="M86 40V38h1V40h2V19h1V40z"') == 2, "a gap is not an activity of 0"
    labels = read(remembering(held, gpu_0=[1.0, 0.5, *[0.0] * 15], gpu_1=[0.001, None, None, 0.5])).labels
    assert (
        labels
        == [
            "last 2 min, 9 % on average, 0 % to 100 %, idle for 2 min",
            "last 40 s, 25 % on average, <1 % to 50 %, 20 s not measured",
        ]
        * 2
    )


def test_device_without_history_has_an_empty_chart_without_label() -> None:
    assert read(made.snapshot(made.held(0, "a"))).labels == []
    assert made.fragment(made.snapshot(made.held(0, "a"))).count('class="spark"') == 2
    assert (
        read(remembering(made.snapshot(made.held(0, "a")), gpu_0=[None] * 90)).labels
        == ["last 15 min, 15 min not measured"] * 2
    )


def test_lost_gpu_shows_its_history_without_dashes() -> None:
    lost = remembering(made.snapshot(made.lost(0)), gpu_0=[0.9, None])
    row = made.fragment(lost).partition('id="gpu-0"')[2].partition("</tr>")[0]
    assert 'aria-label="last 20 s, 90 % on average' in row
    assert "—" not in row
    assert "unknown" not in row


def test_names_link_to_owner_costs_and_faults_to_the_runbook() -> None:
    facts = PodFacts(owner=Owner(namespace="ml", kind="Job", name="train & co"))
    held = made.held(0, "train-0", 0.0, 8000.0)
    known = replace(held, pods=(replace(held.pods[0], facts=facts),))
    shown = made.snapshot(
        known, made.held(1, "b\ud800", namespace="b\ud800"), made.lost(2), attribution={"problem": "no kubelet"}
    )
    links = read(shown, cost_service_url="https://cost.example/gpu").links
    outside = [link for link in links if not link.startswith(("/", "#"))]
    assert outside.count("https://cost.example/gpu/owner?namespace=ml&kind=Job&workload=train%20%26%20co") == 3
    assert "https://cost.example/gpu/owner?namespace=b%3F" in outside
    asked = {link.partition("/runbook#")[2] for link in outside if "/runbook#" in link}
    assert asked == {"gpuidle", "gpuxidcritical", "gpumissing", "gpuexporterattributionfailing"}
    assert all(link.startswith("https://cost.example/gpu/") for link in outside)
    assert not [link for link in read(shown).links if not link.startswith(("/", "#"))], (
        "without an address there are no dead links"
    )


def test_every_linked_runbook_section_exists() -> None:
    templates = Path(node_page.__file__).parent / "templates"
    alerts = {
        name.lower()
        for path in templates.glob("node*.html")
        for name in re.findall(r'"(GPU[A-Z][A-Za-z]+)"', path.read_text(encoding="utf-8"))
    }
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8").lower()
    assert len(alerts) > 10
    assert [alert for alert in alerts if f"\n### {alert}\n" not in runbook] == []


def test_tables_explain_their_activity_and_measures() -> None:
    text = read(made.snapshot(made.shared(0), made.held(1, "a"))).text
    assert "Devices and their holders activity: share of the device" in text
    assert "Owners what they hold now; activity: share of their part" in text
    assert "engine mean share of time in which the compute engine was active processes divided between" in text
    assert "utilisation share of time" not in text, "only for measures in the table"


def test_node_with_56_instances_is_one_small_page() -> None:
    devices = [view for index in range(8) for view in made.partitioned(index, made.SEVEN)]
    restless = [(step * 37 % 101) / 100 for step in range(ActivityHistory.STEPS)]
    past = {f"gpu_{index}": restless for index in range(8)}
    fragment = made.fragment(remembering(made.snapshot(*devices), **past))
    assert fragment.count('<tr role="row" class="part') == 56
    assert len(fragment) < 120_000
