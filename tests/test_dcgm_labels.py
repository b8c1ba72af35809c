"""Choice of the drop-in family's labels, as with three of dcgm-exporter's flags."""

import dataclasses
import re

import pytest
from agent_support import running_agent
from exposition_support import PER_DEVICE, exclusive, gpu, instance, snapshot
from page_support import duplicate_series, samples_of

from exporter.agent.run import _exposition
from exporter.config import load_agent
from exporter.metrics import collectors_file
from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.dcgm_names import DEFAULT, TAKEN, LabelStyle
from exporter.model.snapshot import DeviceView, Snapshot

ALL = LabelStyle(hostname="", old_names=True, model_hyphens=True, pod_uid=True)
OLD_NAMES = {"UUID": "uuid", "pod": "pod_name", "namespace": "pod_namespace", "container": "container_name"}
COUNTS = collectors_file.parse(
    "DCGM_EXP_XID_ERRORS_COUNT, gauge, x\nDCGM_EXP_XID_ERRORS_TOTAL, counter, x\n"
    "DCGM_EXP_CLOCK_EVENTS_COUNT, gauge, x\nDCGM_EXP_CLOCK_EVENTS_TOTAL, counter, x\n"
    "DCGM_EXP_GPU_HEALTH_STATUS, gauge, x\n",
    "c.csv",
)
Series = tuple[str, tuple[tuple[str, str], ...], float]


def series(
    view: Snapshot, style: LabelStyle = DEFAULT, collectors: collectors_file.Collectors | None = None
) -> list[Series]:
    """Return every series of the drop-in family, without duplicates."""
    page = families(view, ExpositionOptions(collectors=collectors or collectors_file.DEFAULT, dcgm_labels=style))
    assert duplicate_series(page) == []
    return [
        (family.name, sample.pairs, sample.value)
        for family in page
        if family.name.startswith("DCGM_")
        for sample in samples_of(family)
    ]


def crowded() -> Snapshot:
    """Return every kind of device and holder, and two compute instances of one GPU instance."""
    parent = gpu(5, mig=True)
    parts = [
        DeviceView(gpu=parent, instance=instance(parent, 3, compute=compute), values=PER_DEVICE) for compute in (0, 1)
    ]
    view = snapshot()
    return dataclasses.replace(view, devices=(*view.devices, *parts))


def test_old_names_rename_the_same_labels() -> None:
    usual = series(crowded(), LabelStyle(pod_uid=True))
    old = series(crowded(), LabelStyle(pod_uid=True, old_names=True))
    assert [
        (name, {OLD_NAMES.get(label, label): text for label, text in pairs}, value) for name, pairs, value in usual
    ] == [(name, dict(pairs), value) for name, pairs, value in old]


@pytest.mark.parametrize(
    ("style", "names"),
    [
        (DEFAULT, "gpu UUID pci_bus_id device modelName Hostname . container err_code err_msg namespace pod"),
        (ALL, "gpu uuid pci_bus_id device modelName . container_name err_code err_msg pod_name pod_namespace pod_uid"),
    ],
)
def test_labels_are_in_dcgm_exporter_order(style: LabelStyle, names: str) -> None:
    ((_, pairs, _),) = (one for one in series(snapshot(exclusive()), style) if one[0] == "DCGM_FI_DEV_XID_ERRORS")
    assert [label for label, _ in pairs] == names.replace(".", "DCGM_FI_DRIVER_VERSION").split()


def test_event_counts_have_the_configured_labels() -> None:
    (pairs, *_) = (pairs for name, pairs, _ in series(snapshot(exclusive()), ALL, COUNTS) if "XID_ERRORS_TOTAL" in name)
    assert [label for label, _ in pairs] == [
        *("gpu", "uuid", "pci_bus_id", "device", "modelName", "xid"),
        *("container_name", "pod_name", "pod_namespace", "pod_uid"),
    ]


def test_hostname_label_can_be_removed_and_model_blanks_become_hyphens() -> None:
    usual = [
        (name, tuple((label, text) for label, text in pairs if label != "Hostname"), value)
        for name, pairs, value in series(crowded())
    ]
    assert series(crowded(), LabelStyle(hostname="")) == usual
    view = dataclasses.replace(exclusive(), gpu=dataclasses.replace(gpu(0), model=" NVIDIA  H100 80GB"))
    models = {dict(pairs)["modelName"] for _, pairs, _ in series(snapshot(view), LabelStyle(model_hyphens=True))}
    assert models == {"NVIDIA-H100-80GB"}


def test_own_series_do_not_depend_on_the_dcgm_label_style() -> None:
    usual, chosen = (
        {
            family.name: family
            for family in families(crowded(), ExpositionOptions(dcgm_labels=style))
            if not family.name.startswith("DCGM_")
        }
        for style in (DEFAULT, ALL)
    )
    assert len(usual) > 20
    assert chosen == usual


def test_reserved_label_names_are_the_labels_in_use() -> None:
    found = {
        label
        for style in (LabelStyle(pod_uid=True), ALL)
        for collectors in (collectors_file.DEFAULT, COUNTS)
        for _, pairs, _ in series(crowded(), style, collectors)
        for label, _ in pairs
    }
    assert found - {"Hostname", "DCGM_FI_DRIVER_VERSION"} == TAKEN


def test_dcgm_exporter_label_switches_change_the_page() -> None:
    with running_agent("-o", "-n", "--rbmn", "--simulate", "demo") as agent:
        page = agent.until(lambda page: any('pod_name="' in name for name in page if name.startswith("DCGM_")), "pods")
    drop_in = [name for name in page if name.startswith("DCGM_FI_")]
    assert not any(re.search(r'[{,](UUID|pod|namespace|container|Hostname)="', name) for name in drop_in)
    assert all(re.search(r',uuid="GPU-[^"]*",.*,modelName="[^ "]+"', name) for name in drop_in)
    # An agent that ends while its libraries load logs a warning, which does not depend on the switches.
    assert not [line for line in agent.lines if "WARNING" in line and "ended without a thread" not in line]


@pytest.mark.parametrize(
    ("address", "attribution", "host"),
    [
        ("gpu-node-7:5555", "off", "gpu-node-7"),
        ("[fd00::7]:5555", "off", "fd00::7"),
        ("gpu-node-7:5555", "on", ""),
        ("localhost:5555", "off", ""),
        ("127.0.0.1:5555", "off", ""),
        ("unix:///run/engine.sock", "off", ""),
        ("embedded", "off", ""),
    ],
)
def test_engine_host_is_the_hostname_label_only_without_attribution(address: str, attribution: str, host: str) -> None:
    config = load_agent({"dcgm-address": address, "attribution": attribution}, {}, check_paths=False)
    assert _exposition(config, collectors_file.DEFAULT).dcgm_labels.engine_host == host
