import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from exposition_support import (
    BOARD,
    PER_DEVICE,
    WHOLE,
    exclusive,
    gpu,
    holder,
    instance,
    lost,
    partitioned,
    shared,
    snapshot,
)
from page_support import changed, duplicate_series, samples_of

from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.collectors_file import default, parse
from exporter.metrics.dcgm_names import LabelStyle
from exporter.metrics.text_format import Family, render
from exporter.model.attribution import AllocationState, Attribution, ShareMode
from exporter.model.devices import DeviceState, SourceState, SourceStatus
from exporter.model.fields import Field
from exporter.model.snapshot import DeviceView, PodUse, Snapshot

# dcgm-exporter's default file, releases up to 4.8: name and type. It typed NVLINK_BANDWIDTH_TOTAL, a rate, as a
# counter up to 4.8.2 and as a gauge from 4.8.3 on.
DROP_IN = {
    "DCGM_FI_DEV_SM_CLOCK": "gauge",
    "DCGM_FI_DEV_MEM_CLOCK": "gauge",
    "DCGM_FI_DEV_MEMORY_TEMP": "gauge",
    "DCGM_FI_DEV_GPU_TEMP": "gauge",
    "DCGM_FI_DEV_POWER_USAGE": "gauge",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "counter",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "counter",
    "DCGM_FI_DEV_GPU_UTIL": "gauge",
    "DCGM_FI_DEV_MEM_COPY_UTIL": "gauge",
    "DCGM_FI_DEV_ENC_UTIL": "gauge",
    "DCGM_FI_DEV_DEC_UTIL": "gauge",
    "DCGM_FI_DEV_XID_ERRORS": "gauge",
    "DCGM_FI_DEV_FB_FREE": "gauge",
    "DCGM_FI_DEV_FB_USED": "gauge",
    "DCGM_FI_DEV_FB_RESERVED": "gauge",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "gauge",
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS": "gauge",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "counter",
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": "counter",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "gauge",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "gauge",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "gauge",
    "DCGM_FI_PROF_DRAM_ACTIVE": "gauge",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "gauge",
    "DCGM_FI_PROF_PCIE_RX_BYTES": "gauge",
}
GPU_LABELS = ["gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "DCGM_FI_DRIVER_VERSION"]
HOLDER_LABELS = ["container", "namespace", "pod"]
MIG_LABELS = [*GPU_LABELS[:5], "GPU_I_PROFILE", "GPU_I_ID", *GPU_LABELS[5:]]
LEGACY = ExpositionOptions()
NEW = ExpositionOptions(collectors=default("4.9"), dcgm_labels=LabelStyle(hostname="hostname"))


def shown(view: Snapshot, options: ExpositionOptions = LEGACY) -> dict[str, Family]:
    return {family.name: family for family in families(view, options)}


def rows(page: dict[str, Family], name: str) -> list[tuple[dict[str, str], float]]:
    return [(dict(sample.pairs), sample.value) for sample in samples_of(page[name])] if name in page else []


def drop_in(page: dict[str, Family]) -> Iterator[tuple[str, dict[str, str], float]]:
    for name in page:
        if name.startswith("DCGM_FI_"):
            for pairs, value in rows(page, name):
                yield name, pairs, value


def test_default_set_matches_dcgm_exporter_in_names_types_and_label_order() -> None:
    page = shown(snapshot(exclusive()))
    assert {name: str(family.kind) for name, family in page.items() if name.startswith("DCGM_")} == DROP_IN
    for name in DROP_IN:
        (sample,) = samples_of(page[name])
        errors = ["err_code", "err_msg"] if name == "DCGM_FI_DEV_XID_ERRORS" else []
        assert [label for label, _ in sample.pairs] == [
            *GPU_LABELS,
            "container",
            *errors,
            *HOLDER_LABELS[1:],
        ], name


def test_exclusive_holder_is_on_every_row_of_its_gpu() -> None:
    ((pairs, value),) = rows(shown(snapshot(exclusive())), "DCGM_FI_DEV_GPU_UTIL")
    assert value == 87
    assert pairs == {
        "gpu": "0",
        "UUID": "GPU-00000000-0000-0000-0000-000000000000",
        "pci_bus_id": "00000000:01:00.0",
        "device": "nvidia0",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": "node-a",
        "DCGM_FI_DRIVER_VERSION": "580.65.06",
        "container": "main",
        "namespace": "vision",
        "pod": "resnet-0",
    }


def test_shared_gpu_has_device_values_once_and_measured_parts_per_holder() -> None:
    page = shown(snapshot(shared()))
    (power,) = rows(page, "DCGM_FI_DEV_POWER_USAGE")
    assert not set(HOLDER_LABELS) & set(power[0])
    bare, first, second = rows(page, "DCGM_FI_DEV_GPU_UTIL")
    assert (bare[1], bare[0].get("pod")) == (87, None)
    assert (first[1], first[0]["pod"]) == (25, "llm-a")
    assert (second[1], second[0]["pod"]) == (50, "llm-b")
    per_holder = {name for name, pairs, _ in drop_in(page) if "pod" in pairs}
    assert per_holder == {"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"}


def test_only_holder_of_a_gpu_share_does_not_get_whole_gpu_values() -> None:
    view = shared()
    alone = dataclasses.replace(view, pods=view.pods[:1])
    rows_of_power = rows(shown(snapshot(alone)), "DCGM_FI_DEV_POWER_USAGE")
    assert ["pod" in pairs for pairs, _ in rows_of_power] == [False]


def test_mig_rows_have_the_gpu_identity_and_only_the_instance_values() -> None:
    page = shown(snapshot(*partitioned()))
    held, free = rows(page, "DCGM_FI_PROF_GR_ENGINE_ACTIVE")
    assert list(held[0]) == [*MIG_LABELS, *HOLDER_LABELS]
    assert list(free[0]) == MIG_LABELS
    assert held[0]["UUID"] == gpu(2).uuid
    assert (held[0]["GPU_I_PROFILE"], held[0]["GPU_I_ID"], held[0]["pod"]) == ("1g.10gb", "9", "notebook")
    for name in ("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"):
        (board,) = rows(page, name)
        assert "GPU_I_ID" not in board[0]
    assert rows(page, "DCGM_FI_DEV_GPU_UTIL") == []
    assert [pairs.get("gpu_instance") for pairs, _ in rows(page, "gpu_power_watts")] == [None]


def test_instance_values_are_not_repeated_on_the_gpu_row() -> None:
    board, *parts = partitioned()
    full = dataclasses.replace(board, values={**board.values, **PER_DEVICE})
    page = shown(snapshot(full, *parts))
    for name, found in ((name, rows(page, name)) for name in page if name.startswith("DCGM_FI_")):
        assert len({"GPU_I_ID" in pairs for pairs, _ in found}) == 1, name
    down = [dataclasses.replace(part, state=DeviceState.FAILED) for part in parts]
    assert ["GPU_I_ID" in pairs for pairs, _ in rows(shown(snapshot(full, *down)), "DCGM_FI_DEV_FB_USED")] == [False]


def test_compute_instances_of_one_gpu_instance_have_separate_rows() -> None:
    parent = gpu(0, mig=True)
    views = [
        DeviceView(gpu=parent, instance=instance(parent, 3, compute=compute), values=PER_DEVICE) for compute in (0, 1)
    ]
    page = shown(snapshot(*views))
    assert [pairs["GPU_CI_ID"] for pairs, _ in rows(page, "DCGM_FI_PROF_DRAM_ACTIVE")] == ["0", "1"]
    assert not duplicate_series(page.values())


def test_unallocated_gpu_has_rows_without_a_pod() -> None:
    view = DeviceView(gpu=gpu(0), values=WHOLE, allocation=AllocationState.UNALLOCATED)
    page = shown(snapshot(view))
    assert all(list(pairs) == GPU_LABELS for name, pairs, _ in drop_in(page))
    states = {pairs["state"]: value for pairs, value in rows(page, "gpu_allocation_state")}
    assert states == {"allocated": 0, "unallocated": 1, "unknown": 0}


def test_unavailable_attribution_is_the_unknown_allocation_state() -> None:
    page = shown(snapshot(DeviceView(gpu=gpu(0), values=WHOLE)))
    states = {pairs["state"]: value for pairs, value in rows(page, "gpu_allocation_state")}
    assert states == {"allocated": 0, "unallocated": 0, "unknown": 1}


def test_lost_gpu_has_no_values_but_is_down_held_and_counted() -> None:
    page = shown(snapshot(exclusive(), lost(1)))
    assert [name for name, pairs, _ in drop_in(page) if pairs["gpu"] == "1"] == ["DCGM_FI_DEV_XID_ERRORS"]
    assert [value for _, value in rows(page, "gpu_up")] == [1, 0]
    assert [pairs["gpu"] for pairs, _ in rows(page, "gpu_power_watts")] == ["0"]
    assert [pairs["pod_name"] for pairs, _ in rows(page, "gpu_pod_info")] == ["resnet-0", "stuck"]
    assert [pairs["pod_name"] for pairs, _ in rows(page, "gpu_pod_idle_for_seconds")] == ["resnet-0"]
    assert [(pairs["state"], value) for pairs, value in rows(page, "gpu_devices")][:2] == [
        ("present", 1),
        ("expected", 5),
    ]
    assert [pairs["xid"] for pairs, _ in rows(page, "gpu_xid_errors_total")] == ["31", "94", "79"]


def test_partitioned_gpu_has_no_profiling_row_without_instance_profiling() -> None:
    profiled = {Field.PROF_GR_ENGINE_ACTIVE: 0.425}
    board, *parts = partitioned()
    board = dataclasses.replace(board, values={**board.values, **profiled})
    silent = [
        dataclasses.replace(part, values={field: part.values[field] for field in part.values if field < 1001})
        for part in parts
    ]
    page = shown(snapshot(board, *silent))
    assert [pairs for pairs, _ in rows(page, "DCGM_FI_PROF_GR_ENGINE_ACTIVE")] == []
    assert [value for _, value in rows(shown(snapshot(board)), "DCGM_FI_PROF_GR_ENGINE_ACTIVE")] == [0.425]


@pytest.mark.parametrize(
    ("sources", "host"),
    [
        ((SourceStatus(name="dcgm", state=SourceState.UP),), "gpu-node-7"),
        (
            (
                SourceStatus(name="nvml", state=SourceState.FAILED, reason="library_not_found"),
                SourceStatus(name="dcgm", state=SourceState.UP),
            ),
            "gpu-node-7",
        ),
        (
            (SourceStatus(name="nvml", state=SourceState.UP), SourceStatus(name="dcgm", state=SourceState.UP)),
            "node-a",
        ),
    ],
)
def test_hostname_label_is_the_remote_engine_host_with_dcgm(sources: tuple[SourceStatus, ...], host: str) -> None:
    style = LabelStyle(engine_host="gpu-node-7")
    page = shown(dataclasses.replace(snapshot(exclusive()), sources=sources), ExpositionOptions(dcgm_labels=style))
    assert {pairs["Hostname"] for _, pairs, _ in drop_in(page)} == {host}


def test_unmeasured_values_are_absent() -> None:
    page = shown(snapshot(DeviceView(gpu=gpu(0))))
    assert list(drop_in(page)) == []
    for name in ("gpu_activity_ratio", "gpu_memory_used_bytes", "gpu_power_watts", "gpu_throttle_active"):
        assert name not in page
    empty = Snapshot(taken_at_seconds=1.0, node="node-a", attribution=Attribution(known=False, source=""))
    assert [name for name in shown(empty) if not name.startswith("gpu_exporter_")] == []


def test_non_finite_value_is_left_out_and_counted() -> None:
    broken = dataclasses.replace(exclusive(), values={**WHOLE, Field.POWER_USAGE: float("nan")})
    page = shown(snapshot(broken))
    assert "DCGM_FI_DEV_POWER_USAGE" not in page
    assert ({"part": "exposition", "reason": "not_finite"}, 2) in rows(page, "gpu_exporter_errors_total")


def test_last_xid_has_code_and_meaning_and_is_absent_before_the_first() -> None:
    ((pairs, value),) = rows(shown(snapshot(exclusive())), "DCGM_FI_DEV_XID_ERRORS")
    assert (value, pairs["err_code"], pairs["err_msg"]) == (94, "94", "Contained ECC error")
    assert "DCGM_FI_DEV_XID_ERRORS" not in shown(snapshot(shared()))


def test_own_metrics_use_base_units() -> None:
    page = shown(snapshot(exclusive()))
    assert rows(page, "gpu_energy_joules_total")[0][1] == 8_123_456.789
    assert rows(page, "gpu_memory_total_bytes")[0][1] == 81_559 * 1024 * 1024
    assert [(pairs["reason"], value) for pairs, value in rows(page, "gpu_throttle_seconds_total")] == [("power", 1.5)]
    active = [pairs["reason"] for pairs, value in rows(page, "gpu_throttle_active") if value]
    assert active == ["power_cap"]


def test_own_labels_do_not_clash_with_prometheus_target_labels() -> None:
    names = {
        label
        for name, family in shown(snapshot()).items()
        if not name.startswith("DCGM_FI_")
        for sample in samples_of(family)
        for label, _ in sample.pairs
    }
    assert not names & {"instance", "job", "namespace", "pod", "container", "service", "endpoint", "hostname"}


def test_pod_share_and_activity_are_shown_with_their_source() -> None:
    page = shown(snapshot(shared()))
    infos = [pairs for pairs, _ in rows(page, "gpu_pod_info")]
    assert [(one["share_mode"], one["attribution_source"], one["pod_uid"]) for one in infos] == [
        ("shared", "device-plugin", "uid-llm-a"),
        ("shared", "device-plugin", "uid-llm-b"),
    ]
    parts = [(pairs["source"], value) for pairs, value in rows(page, "gpu_pod_activity_ratio")]
    assert parts == [("process_samples", 0.25), ("process_samples", 0.5)]
    assert rows(page, "gpu_unattributed_activity_ratio")[0][1] == 0.12


def test_unresolved_devices_are_counted_by_reason() -> None:
    ((pairs, value),) = rows(shown(snapshot(exclusive())), "gpu_pod_unresolved_devices")
    assert (pairs["pod_name"], pairs["reason"], value) == ("odd", "unknown_uuid", 1)


def test_exporter_reports_its_sources_and_the_kubelet() -> None:
    hung = changed(
        snapshot(exclusive()),
        sources=(SourceStatus(name="nvml", state=SourceState.HUNG, restarts=3),),
        attribution={"problem": "the kubelet does not answer"},
    )
    page = shown(hung)
    assert {pairs["source"]: value for pairs, value in rows(page, "gpu_exporter_source_up")} == {
        "nvml": 0,
        "kubelet": 0,
        "kubernetes-api": 1,
    }
    assert rows(page, "gpu_exporter_worker_restarts_total") == [({"source": "nvml"}, 3)]
    assert rows(page, "gpu_exporter_simulated") == [({}, 1)]
    assert ({"part": "attribution", "reason": "unavailable"}, 3) in rows(page, "gpu_exporter_errors_total")


def test_pod_rows_have_the_uid_on_request_and_the_container_if_known() -> None:
    nameless = holder("bare", gpu(0).uuid)
    nameless = dataclasses.replace(nameless, container="", pod_uid=None)
    bare = dataclasses.replace(exclusive(), pods=(PodUse(holder=nameless, age_seconds=1.0),))
    for with_uid in (False, True):
        page = shown(snapshot(bare, shared()), ExpositionOptions(dcgm_labels=LabelStyle(pod_uid=with_uid)))
        named = [pairs for _, pairs, _ in drop_in(page) if "pod" in pairs]
        assert {tuple(pairs)[-2:] for pairs in named if pairs["pod"] == "bare"} >= {("namespace", "pod")}
        assert not any("container" in pairs for pairs in named if pairs["pod"] == "bare")
        uids = {pairs.get("pod_uid") for pairs in named if pairs["pod"] == "llm-a"}
        assert uids == ({"uid-llm-a"} if with_uid else {None})
        assert "container_name" not in rows(page, "gpu_pod_share_ratio")[0][0]


def test_page_has_no_duplicate_series() -> None:
    for options in (LEGACY, NEW):
        assert duplicate_series(families(snapshot(), options)) == []


def test_duplicate_series_is_dropped_and_counted() -> None:
    view = shared()
    twice = dataclasses.replace(view, pods=(view.pods[0], view.pods[0]))
    page = shown(snapshot(twice))
    assert duplicate_series(page.values()) == []
    counted = {pairs["reason"]: value for pairs, value in rows(page, "gpu_exporter_errors_total")}
    assert counted["duplicate_series"] > 0


def test_holder_over_the_series_limit_is_left_out_completely_and_counted() -> None:
    view = changed(snapshot(shared()), metering={"ledger": None})
    page = shown(view, dataclasses.replace(LEGACY, series_limit=7))
    assert [pairs["pod_name"] for pairs, _ in rows(page, "gpu_pod_info")] == ["llm-a"]
    assert rows(page, "gpu_exporter_dropped_series_total") == [({}, 6)]
    assert len(rows(page, "DCGM_FI_DEV_FB_USED")) == 3


def test_new_names_have_the_new_units_and_label_names() -> None:
    page = shown(snapshot(exclusive()), NEW)
    ((pairs, value),) = rows(page, "DCGM_FI_DEV_GPU_UTIL_RATIO")
    assert (value, pairs["hostname"], pairs["DCGM_FI_SYSTEM_DRIVER_VERSION"]) == (0.87, "node-a", "580.65.06")
    assert rows(page, "DCGM_FI_DEV_FB_USED_BYTES")[0][1] == 41_000 * 1024 * 1024
    assert rows(page, "DCGM_FI_DEV_FB_CAPACITY_BYTES")[0][1] == 81_559 * 1024 * 1024
    assert "DCGM_FI_DEV_GPU_UTIL" not in page


def test_collectors_file_replaces_the_default_set() -> None:
    chosen = parse("DCGM_FI_DEV_FB_TOTAL, gauge, Memory\nDCGM_FI_DEV_SERIAL, label, Serial\n", "c.csv")
    page = shown(snapshot(exclusive()), ExpositionOptions(collectors=chosen))
    ((name, pairs, value),) = drop_in(page)
    assert (name, value, pairs["DCGM_FI_DEV_SERIAL"]) == ("DCGM_FI_DEV_FB_TOTAL", 81_559, "165000")
    assert "DCGM_FI_DRIVER_VERSION" not in pairs


EVENT_ROWS = parse(
    "DCGM_EXP_XID_ERRORS_COUNT, gauge, x\nDCGM_EXP_XID_ERRORS_TOTAL, counter, x\n"
    "DCGM_EXP_CLOCK_EVENTS_COUNT, gauge, x\nDCGM_EXP_CLOCK_EVENTS_TOTAL, counter, x\n"
    "DCGM_FI_DRIVER_VERSION, label, x\n",
    "c.csv",
)


def events(view: Snapshot, name: str) -> dict[tuple[str, str, str], float]:
    """Return one of dcgm-exporter's own counts: values by GPU, GPU instance, and Xid or event."""
    page = shown(view, ExpositionOptions(collectors=EVENT_ROWS))
    return {
        (pairs["gpu"], pairs.get("GPU_I_ID", ""), pairs.get("xid") or pairs.get("clock_event", "")): value
        for pairs, value in rows(page, name)
    }


def test_xid_count_is_per_gpu_or_instance_and_zero_without_any() -> None:
    assert events(snapshot(), "DCGM_EXP_XID_ERRORS_COUNT") == {
        ("0", "", "31"): 2,
        ("1", "", ""): 0,
        ("2", "", ""): 0,
        ("2", "9", "43"): 1,
        ("2", "10", ""): 0,
        ("3", "", "79"): 1,
    }, "a lost GPU keeps the Xid of its loss"


def test_xid_total_has_a_row_per_observed_code() -> None:
    assert events(snapshot(), "DCGM_EXP_XID_ERRORS_TOTAL") == {
        ("0", "", "31"): 2,
        ("0", "", "94"): 1,
        ("3", "", "79"): 1,
    }


def test_clock_events_are_per_gpu_and_only_for_gpus_that_respond() -> None:
    assert events(snapshot(), "DCGM_EXP_CLOCK_EVENTS_COUNT") == {("0", "", "power_cap"): 12, ("1", "", ""): 0}
    assert events(snapshot(), "DCGM_EXP_CLOCK_EVENTS_TOTAL") == {("0", "", "power_cap"): 3, ("0", "", "hw_thermal"): 1}


def test_event_counts_have_the_labels_of_dcgm_exporter_and_the_window() -> None:
    page = shown(snapshot(exclusive()), ExpositionOptions(collectors=EVENT_ROWS))
    recent, total = page["DCGM_EXP_XID_ERRORS_COUNT"], page["DCGM_EXP_XID_ERRORS_TOTAL"]
    assert [name for name, _ in samples_of(recent)[0].pairs] == [
        *GPU_LABELS,
        "window_size_in_ms",
        "xid",
        *HOLDER_LABELS,
    ]
    assert dict(samples_of(recent)[0].pairs)["window_size_in_ms"] == "300000"
    assert [name for name, _ in samples_of(total)[0].pairs] == [*GPU_LABELS, "xid", *HOLDER_LABELS]
    assert [str(page[f"DCGM_EXP_{name}"].kind) for name in ("XID_ERRORS_COUNT", "CLOCK_EVENTS_TOTAL")] == [
        "gauge",
        "counter",
    ]


def test_custom_window_is_in_the_window_label() -> None:
    longer = dataclasses.replace(snapshot(exclusive()), clock_events_window_seconds=60.0, xid_window_seconds=0.5)
    page = shown(longer, ExpositionOptions(collectors=EVENT_ROWS))
    assert rows(page, "DCGM_EXP_CLOCK_EVENTS_COUNT")[0][0]["window_size_in_ms"] == "60000"
    assert rows(page, "DCGM_EXP_XID_ERRORS_COUNT")[0][0]["window_size_in_ms"] == "500"


def test_dcgm_only_fields_are_shown_per_device_and_texts_as_labels() -> None:
    device, chosen = (
        partitioned(),
        parse("1013, gauge, IMMA\n1076, gauge, C2C\n1606, gauge, clock\n172, label, x\n68, label, x\n", "c.csv"),
    )
    board, held, free = device
    texts = {Field(172): "cluster-7", Field(68): "0"}
    page = shown(
        snapshot(
            dataclasses.replace(
                board,
                values={Field(1013): 0.1, Field(1076): 5, Field(110): 1410},
                gpu=dataclasses.replace(board.gpu, labels=texts),
            ),
            dataclasses.replace(held, values={Field(1013): 0.25, Field(1076): 5, Field(110): 1410}),
            free,
        ),
        ExpositionOptions(collectors=chosen),
    )
    assert [(pairs.get("GPU_I_ID"), value) for pairs, value in rows(page, "DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE")] == [
        ("9", 0.25)
    ]
    ((pairs, value),) = rows(page, "DCGM_FI_PROF_C2C_TX_ALL_BYTES")
    assert (value, pairs["DCGM_FI_DEV_FABRIC_CLUSTER_UUID"], "GPU_I_ID" in pairs) == (5, "cluster-7", False)
    assert pairs["DCGM_FI_DEV_CUDA_VISIBLE_DEVICES_STR"] == "0"
    assert rows(page, "DCGM_FI_DEV_SM_APP_CLOCK_HERTZ")[0][1] == 1_410_000_000
    of_instance = rows(page, "DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE")[0][0]
    assert "DCGM_FI_DEV_CUDA_VISIBLE_DEVICES_STR" not in of_instance, "the board has this label"


def test_name_uuid_and_pci_address_are_labels_without_dcgm() -> None:
    chosen = parse(
        "DCGM_FI_DEV_GPU_TEMP, gauge, x\nDCGM_FI_PROF_SM_ACTIVE, gauge, x\n50, label, x\n54, label, x\n57, label, x\n",
        "c.csv",
    )
    board, held, _ = partitioned()
    held = dataclasses.replace(held, values={Field.PROF_SM_ACTIVE: 0.5})
    page = shown(snapshot(board, held), ExpositionOptions(collectors=chosen))
    texts = ("DCGM_FI_DEV_NAME", "DCGM_FI_DEV_UUID", "DCGM_FI_DEV_PCI_BUSID")
    ((of_board, _),) = rows(page, "DCGM_FI_DEV_GPU_TEMP")
    assert [of_board[name] for name in texts] == ["NVIDIA H100 80GB HBM3", board.gpu.uuid, "00000000:03:00.0"]
    ((of_instance, _),) = rows(page, "DCGM_FI_PROF_SM_ACTIVE")
    assert [of_instance[name] for name in texts] == ["1g.10gb", held.uuid, "00000000:03:00.0"]


def test_gpu_with_two_whole_holders_is_shared() -> None:
    device = gpu(0)
    uses = tuple(PodUse(holder=holder(pod, device.uuid), age_seconds=1.0) for pod in ("a", "b"))
    page = shown(snapshot(DeviceView(gpu=device, values=BOARD, pods=uses)))
    assert ["pod" in pairs for _, pairs, _ in drop_in(page)] == [False] * len(list(drop_in(page)))


def test_shared_mig_instance_has_no_holder_on_device_rows() -> None:
    parent = gpu(0, mig=True)
    part = instance(parent, 1)
    use = PodUse(holder=holder("a", part.uuid, ShareMode.SHARED, parts=2), age_seconds=1.0)
    page = shown(snapshot(DeviceView(gpu=parent, instance=part, values=PER_DEVICE, pods=(use,))))
    assert all("pod" not in pairs for _, pairs, _ in drop_in(page))


def test_missing_gpu_is_expected_and_not_present() -> None:
    gone = DeviceView(gpu=gpu(1), state=DeviceState.MISSING)
    page = shown(snapshot(exclusive(), gone))
    assert {pairs["state"]: value for pairs, value in rows(page, "gpu_devices")}["present"] == 1


@pytest.mark.parametrize(
    ("name", "options", "openmetrics"),
    [
        ("exposition_legacy.txt", LEGACY, False),
        (
            "exposition_4.9.openmetrics.txt",
            NEW,
            True,
        ),
    ],
)
def test_page_of_the_test_node_matches_the_golden_file(
    name: str, options: ExpositionOptions, *, openmetrics: bool
) -> None:
    golden = Path(__file__).parent / "golden" / name
    page = render(
        [family for family in families(snapshot(), options) if family.name != "gpu_exporter_build_info"],
        openmetrics=openmetrics,
    )
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_bytes(page)
    assert page.decode() == golden.read_text()


def health(*devices: DeviceView) -> dict[tuple[str, str], tuple[float, str]]:
    """Return value and error code of the health status by GPU and watch."""
    read = parse("DCGM_EXP_GPU_HEALTH_STATUS, gauge, x\n", "counters.csv")
    assert read.warnings == ()
    page = shown(snapshot(*devices), ExpositionOptions(collectors=read))
    assert str(page["DCGM_EXP_GPU_HEALTH_STATUS"].kind) == "gauge"
    return {
        (pairs["gpu"], pairs["health_watch"]): (value, pairs["health_error_code"])
        for pairs, value in rows(page, "DCGM_EXP_GPU_HEALTH_STATUS")
    }


def test_health_status_is_derived_from_recovery_action_remapping_and_xids() -> None:
    well = dataclasses.replace(shared(), values={Field.GPU_RECOVERY_ACTION: 0, Field.ROW_REMAP_FAILURE: 0})
    statuses = health(well)
    assert {watch for _, watch in statuses} == {"ALL", "MEM", "NVLINK", "INFOROM", "DRIVER"}
    assert set(statuses.values()) == {(0, "DCGM_FR_OK")}
    broken = dataclasses.replace(
        exclusive(), state=DeviceState.RESET_REQUIRED, values={Field.GPU_RECOVERY_ACTION: 1, Field.ROW_REMAP_FAILURE: 1}
    )
    statuses = health(broken)
    assert statuses["0", "DRIVER"] == (20, "DCGM_FR_GPU_RECOVERY_RESET")
    assert statuses["0", "MEM"] == (20, "DCGM_FR_ROW_REMAP_FAILURE"), "the worst counts: Xid 31 only warns"
    assert statuses["0", "ALL"] == (0, "DCGM_FR_OK")


def test_lost_gpu_has_failed_and_an_instance_xid_counts_for_its_gpu() -> None:
    board, *parts = partitioned()
    statuses = health(lost(), dataclasses.replace(board, values={}), *parts)
    assert {key: value for key, value in statuses.items() if key[0] == "3"} == {
        ("3", "ALL"): (20, "DCGM_FR_FALLEN_OFF_BUS")
    }
    assert statuses["2", "MEM"] == (10, "DCGM_FR_XID_ERROR")
    assert ("2", "DRIVER") not in statuses, "no recovery action was read"


def test_gpu_that_responds_after_xid_79_has_failed() -> None:
    back = dataclasses.replace(lost(), state=DeviceState.UP, reason="", values={Field.GPU_RECOVERY_ACTION: 0})
    assert health(back)["3", "ALL"] == (20, "DCGM_FR_FALLEN_OFF_BUS")
