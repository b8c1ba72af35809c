"""Owners on the page: next to each pod, among idle owners, and by held GPUs; and the page without owners."""

from dataclasses import replace

import page_support as made
from page_support import changed
from test_page import EVIL, read
from test_page_money import priced

from exporter.model.attribution import MetadataStatus, NodeFacts, Owner, PodFacts
from exporter.model.snapshot import DeviceView, Snapshot

TRAIN = PodFacts(
    owner=Owner(namespace="ml", kind="PyTorchJob", name="train", team="core"), queue="gold", workload_class="batch"
)


def of(view: DeviceView, facts: PodFacts | None, **changes: object) -> DeviceView:
    return replace(
        view, pods=tuple(replace(use, facts=facts, holder=replace(use.holder, **changes)) for use in view.pods)
    )


def known(*views: DeviceView, **changes: object) -> Snapshot:
    return changed(priced(*views, metadata=MetadataStatus(known=True)), **changes)


def test_pod_row_shows_workload_team_queue_and_class() -> None:
    text = read(known(of(made.held(0, "train-worker-0"), TRAIN))).text
    assert "ml/ train-worker-0 main PyTorchJob train · team core · queue gold · batch" in text


def test_pods_of_one_workload_with_different_cost_labels_are_one_owner() -> None:
    other = replace(TRAIN, owner=replace(TRAIN.owner, cost_labels="project=llm"))
    text = read(known(of(made.held(0, "train-worker-0"), TRAIN), of(made.held(1, "train-worker-1"), other))).text
    assert "2 in 2 pods" in text


def test_owner_text_already_in_the_pod_name_is_not_repeated() -> None:
    itself = PodFacts(owner=Owner(namespace="ml", kind="Pod", name="lonely"))
    notebook = PodFacts(owner=Owner(namespace="ml", kind="Notebook", name="anna"))
    html = made.fragment(known(of(made.held(0, "lonely"), itself), of(made.held(1, "anna"), notebook)))
    assert "Pod lonely" not in html
    assert '<span class="whose">Notebook</span>' in html


def test_active_opt_out_is_shown_with_its_end() -> None:
    def page_text(until: float) -> str:
        return read(known(of(made.held(0, "a", 0.0, 8000.0), replace(TRAIN, opt_out_until_seconds=until)))).text

    assert page_text(made.TAKEN_AT + 3600).count("alerts off until 2027-01-15 09:00 UTC") == 2, "also in the idle list"
    assert "alerts off" in page_text(float("inf"))
    assert "alerts off until" not in page_text(float("inf"))
    assert "alerts off" not in page_text(made.TAKEN_AT)


def test_invalid_pod_annotations_are_shown_in_its_row() -> None:
    assert (
        "not understood: bad opt out"
        in read(known(of(made.held(0, "a"), replace(TRAIN, problems=("bad_opt_out",))))).text
    )


def test_unknown_owner_is_shown_only_with_pod_metadata() -> None:
    view = made.held(0, "young")
    assert read(known(view)).text.count("owner not known yet") == 2
    assert "owner not known yet" not in made.fragment(priced(view))


def test_idle_pods_of_one_workload_are_one_line_with_their_total_cost() -> None:
    workers = [of(made.held(index, f"train-{index}", 0.0, 3600.0 * hours), TRAIN) for index, hours in enumerate((3, 5))]
    text = read(known(*workers)).text
    assert "idle for 3 h to 5 h $32.00 at $8.00 an hour ml/ train PyTorchJob · 2 pods · team core GPU 0, GPU 1" in text
    assert text.count("idle for") == 1
    assert "Idle holders 2" in text


def test_owners_are_sorted_by_cost_and_the_unallocated_row_is_last() -> None:
    served = replace(TRAIN, owner=Owner(namespace="serving", kind="Deployment", name="chat"))
    text = read(
        known(
            of(made.held(0, "t-0"), TRAIN),
            of(made.held(1, "t-1", 0.0, 600), TRAIN),
            of(made.shared(2), served),
            made.view(3),
        )
    ).text
    owners = text.partition("Owners what they hold now; activity: share of their part")[2]
    assert owners.startswith(
        " Owner Activity Idle GPUs Per hour ml/ train PyTorchJob · team core 45 % 1 idle 2 in 2 pods $8.00"
    )
    assert "serving/ chat Deployment 49 % 0.25 idle 0.75 in 3 pods $3.00" in owners
    assert "nobody 1.25 $5.00" in owners


def test_namespaces_are_the_owners_without_metadata_and_the_page_shows_the_fix() -> None:
    text = read(made.snapshot(made.held(0, "a"))).text
    assert "Namespaces are charged: pod metadata is off. --kube-metadata on adds workloads, teams and queues." in text
    assert "ml namespace" in text
    assert "Namespaces are charged" not in made.fragment(known(made.held(0, "a")))
    assert "Namespaces are charged" not in made.fragment(made.snapshot(made.held(0, "a"), attribution={"source": ""}))


def test_long_owner_list_is_truncated_with_a_sum_of_the_rest() -> None:
    views = [
        of(made.held(i, f"p{i}"), replace(TRAIN, owner=Owner(namespace="ml", kind="Job", name=f"j{i}")))
        for i in range(23)
    ]
    assert "3 more owners 90 % 3 in 3 pods $12.00" in read(known(*views)).text


def test_api_problems_and_the_age_of_owner_data_are_shown() -> None:
    troubled = known(
        made.held(0, "a"), metadata={"problem": "pods forbidden; grant <list>", "at_seconds": made.TAKEN_AT - 600}
    )
    text = read(troubled).text
    assert "owners : pods forbidden; grant <list>" in text
    assert "owners known, 10 min ago" in text
    assert "owners unknown" in read(changed(troubled, metadata={"known": False})).text
    assert "owners not read yet" in read(changed(troubled, metadata={"known": False, "problem": ""})).text


def test_differing_gpu_counts_are_shown() -> None:
    views = (made.held(0, "a"), made.lost(1))
    page_text = read(made.snapshot(*views, attribution={"advertised_devices": 2, "allocated_devices": 2})).text
    assert "GPUs : 1 seen by the driver, 2 advertised by the kubelet, 2 held by pods" in page_text
    old_kubelet = read(made.snapshot(*views, attribution={"allocated_devices": 2})).text
    assert "GPUs : 1 seen by the driver, 2 held by pods" in old_kubelet
    for agreeing in (
        {"attribution": {"advertised_devices": 1, "allocated_devices": 1}},
        {},
        {"reading": None, "attribution": {"advertised_devices": 2}},
    ):
        assert "seen by the driver" not in made.fragment(made.snapshot(*views, **agreeing))


def test_holder_source_is_shown_unless_it_is_the_device_plugin() -> None:
    words = {"annotation": "by annotation", "job-mapping": "by job mapping", "process": "by processes", "dra": "dra"}
    for name, shown in words.items():
        text = read(made.snapshot(of(made.held(0, "a"), None, source=name, container="", namespace=""))).text
        assert f" a {shown} " in text
    assert "device-plugin" not in read(made.snapshot(made.held(0, "a"))).text


def test_node_facts_are_shown_in_the_header() -> None:
    facts = NodeFacts(instance_type="p5.48xlarge", capacity_type="spot", region="us-east-1")
    assert "p5.48xlarge · spot · us-east-1" in read(made.snapshot(metering={"node_facts": facts})).text


def test_pod_and_api_texts_are_escaped() -> None:
    evil = PodFacts(
        owner=Owner(namespace=EVIL, kind=EVIL, name=EVIL, team=EVIL), queue=EVIL, workload_class=EVIL, problems=(EVIL,)
    )
    views = [of(made.held(index, f"a{index}", 0.0, 900.0), evil) for index in range(2)]
    facts = NodeFacts(instance_type=EVIL, capacity_type=EVIL, region=EVIL)
    snapshot = known(*views, metadata={"problem": EVIL}, metering={"node_facts": facts})
    assert "<script>alert" not in made.fragment(snapshot)
    assert EVIL in read(snapshot).text
