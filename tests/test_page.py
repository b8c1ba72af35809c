"""The page: whole, escaped, true to the snapshot, and usable without script, colour or mouse."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import page_support as made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.model import AllocationState, Snapshot, SourceState, SourceStatus, formatting
from exporter.web import node_page

VOID = {"meta", "link", "rect", "br"}
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
        self.scopes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "th":
            self.scopes.append((tag, found.get("scope")))
        self.links += [str(found[name]) for name in ("href", "src") if found.get(name)]
        self.attributes |= set(found)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag == "rect"
        self.attributes |= set(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(snapshot: Snapshot | None, *, whole: bool = False) -> Tags:
    tags = Tags()
    tags.feed(node_page.document(snapshot) if whole else node_page.fragment(snapshot))
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    return tags


def test_the_page_says_who_holds_what_and_since_when_it_is_idle() -> None:
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


def test_a_simulated_node_says_so_at_the_top_and_in_the_title_and_a_real_one_never() -> None:
    simulated, real = node_page.document(made.rich_snapshot()), node_page.document(made.snapshot(made.held(0, "a")))
    assert "SIMULATED NODE — nothing here is real" in simulated
    assert "<title>SIMULATED GPUs of" in simulated
    assert "SIMULATED" not in real


def test_the_longest_idle_holder_comes_first() -> None:
    text = read(made.snapshot(made.held(0, "short", 0.0, 300), made.held(1, "long", 0.0, 90_000))).text
    assert text.index("idle for 25 h 0 min") < text.index("idle for 5 min")


def test_the_card_of_a_shared_gpu_counts_its_idle_sharers() -> None:
    assert "GPU 5 1 idle 62 % 3 pods" in read(made.snapshot(made.shared(5))).text


def test_a_pod_is_idle_only_since_the_last_of_its_devices_went_idle() -> None:
    text = read(made.snapshot(made.held(0, "pair", 0.0, 9000), made.held(1, "pair", 0.0, 600))).text
    assert "idle for 10 min ml/ pair GPU 0, GPU 1" in text


def test_a_long_list_of_idle_holders_is_cut_and_says_so() -> None:
    text = read(made.snapshot(*(made.held(index, f"pod-{index}", 0.0, 1000.0 + index) for index in range(11)))).text
    assert "idle for 16 min ml/ pod-10" in text
    assert "and 3 more, marked in the table" in text


def test_nobody_is_pointed_at_for_a_short_pause_or_for_what_was_not_measured() -> None:
    page_html = node_page.fragment(made.snapshot(made.held(0, "bursty", 0.0, 60), made.held(1, "dark", None)))
    assert "Held, but idle" not in page_html
    assert "nothing on this device measures it" in page_html


def test_free_held_and_unknown_are_three_different_words() -> None:
    unknown = made.view(1, allocation=AllocationState.UNKNOWN)
    text = read(made.snapshot(made.view(0), unknown, made.held(2, "a"))).text
    assert "free" in text
    assert "holder unknown" in text
    assert "in use" in text


def test_troubles_of_source_and_attribution_are_told_with_their_mend() -> None:
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


def test_before_the_first_picture_there_is_a_page_too() -> None:
    assert "Starting" in read(None, whole=True).text


def test_nothing_is_loaded_from_elsewhere_and_only_the_pages_own_script_may_run() -> None:
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


def test_the_page_works_without_script_and_is_announced_to_those_who_do_not_see() -> None:
    document = node_page.document(made.rich_snapshot())
    tags = read(made.rich_snapshot(), whole=True)
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in document
    assert '<html lang="en">' in document
    assert "<caption>" in document
    assert all(scope in {"row", "col"} for _, scope in tags.scopes)
    assert document.count('aria-live="polite"') == 1
    assert all('aria-hidden="true"' in svg for svg in re.findall("<svg[^>]*>", document))


def test_text_from_outside_is_escaped_everywhere() -> None:
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
    assert "<script>alert" not in node_page.fragment(snapshot)
    assert node_page.document(snapshot).count("<script>") == 1
    assert EVIL in read(snapshot).text
    assert "onload" not in read(snapshot).attributes, "out of the quotes of another attribute"


@given(st.text(min_size=1, max_size=20), st.text(max_size=20))
def test_no_name_can_break_the_page(pod: str, namespace: str) -> None:
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
def test_durations_are_told_as_people_say_them(seconds: float, text: str, brief: str) -> None:
    assert formatting.duration(seconds) == text
    assert formatting.brief(seconds) == brief


def test_a_little_activity_is_not_shown_as_none() -> None:
    assert formatting.percent(0.001) == "<1 %"
    assert formatting.percent(0.0) == "0 %"


def test_a_node_with_56_instances_is_one_light_page() -> None:
    devices = [view for index in range(8) for view in made.partitioned(index, made.SEVEN)]
    fragment = node_page.fragment(made.snapshot(*devices))
    assert fragment.count('<tr role="row" class="part') == 56
    assert len(fragment) < 120_000
