"""Compares what the agent exposes of the ``capture-*`` scenarios with recorded output of real GPUs, field by field.

Source of the recordings: github.com/utkuozdemir/nvidia_gpu_exporter, internal/captures (MIT). The scenario's driver
lies under the real NVML binding; the agent's own source, views and page follow. Compared are names, units and values
of every field that nvidia-smi and the drop-in family both have, that what is N/A there is absent here, the text
fields, and the MIG rows. nvidia-smi rounds MiB to the nearest, DCGM downwards: those
may differ by one and are counted apart.

    python benchmarks/capture_compare.py [--captures DIR]
"""

import argparse
import csv
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from exporter.accounting.idle import IdleClock
from exporter.agent.facts import Attributor
from exporter.agent.views import Viewer
from exporter.attribution.join import attribute
from exporter.attribution.processes import PidResolver, PodNames
from exporter.gpu.nvml.source import NvmlSource
from exporter.metrics import collectors_file
from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import render
from exporter.model import Allocations, ContainerAllocation, DeviceIds, Snapshot
from gpu_simulator import driver, scenario
from gpu_simulator.node import write_filesystem

CAPTURES = {
    "capture-h100": "linux-x86_64__nvidia-h100-80gb-hbm3__590.48.01.txt",
    "capture-h100-mig": "linux-x86_64__nvidia-h100-mig__590.48.01.txt",
    "capture-l40s": "linux-x86_64__nvidia-l40s__595.80.txt",
}
PHASES = {"idle": 30.0, "load": 90.0}
EPOCH = 1_700_000_000.0
MIB = 1 << 20

# Field of --query-gpu with its unit; metric; factor from nvidia-smi's unit to the metric's.
QUERIED = """
temperature.gpu                                  | DCGM_FI_DEV_GPU_TEMP                    | 1
temperature.gpu.tlimit                           | DCGM_FI_DEV_GPU_TEMP_LIMIT              | 1
temperature.memory                               | DCGM_FI_DEV_MEMORY_TEMP                 | 1
power.draw.average [W]                           | DCGM_FI_DEV_POWER_USAGE                 | 1
power.draw.instant [W]                           | DCGM_FI_DEV_POWER_USAGE_INSTANT         | 1
power.limit [W]                                  | DCGM_FI_DEV_POWER_MGMT_LIMIT            | 1
power.min_limit [W]                              | DCGM_FI_DEV_POWER_MGMT_LIMIT_MIN        | 1
power.max_limit [W]                              | DCGM_FI_DEV_POWER_MGMT_LIMIT_MAX        | 1
power.default_limit [W]                          | DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF        | 1
enforced.power.limit [W]                         | DCGM_FI_DEV_ENFORCED_POWER_LIMIT        | 1
clocks.current.sm [MHz]                          | DCGM_FI_DEV_SM_CLOCK                    | 1
clocks.current.memory [MHz]                      | DCGM_FI_DEV_MEM_CLOCK                   | 1
clocks.current.video [MHz]                       | DCGM_FI_DEV_VIDEO_CLOCK                 | 1
clocks.max.sm [MHz]                              | DCGM_FI_DEV_MAX_SM_CLOCK                | 1
clocks.max.memory [MHz]                          | DCGM_FI_DEV_MAX_MEM_CLOCK               | 1
clocks_event_reasons.active                      | DCGM_FI_DEV_CLOCK_THROTTLE_REASONS      | 1
clocks_event_reasons_counters.sw_power_cap [us]  | DCGM_FI_DEV_POWER_VIOLATION             | 1000
clocks_event_reasons_counters.sync_boost [us]    | DCGM_FI_DEV_SYNC_BOOST_VIOLATION        | 1000
memory.total [MiB]                               | DCGM_FI_DEV_FB_TOTAL                    | 1
memory.reserved [MiB]                            | DCGM_FI_DEV_FB_RESERVED                 | 1
memory.used [MiB]                                | DCGM_FI_DEV_FB_USED                     | 1
memory.free [MiB]                                | DCGM_FI_DEV_FB_FREE                     | 1
utilization.gpu [%]                              | DCGM_FI_DEV_GPU_UTIL                    | 1
utilization.memory [%]                           | DCGM_FI_DEV_MEM_COPY_UTIL               | 1
utilization.encoder [%]                          | DCGM_FI_DEV_ENC_UTIL                    | 1
utilization.decoder [%]                          | DCGM_FI_DEV_DEC_UTIL                    | 1
pstate                                           | DCGM_FI_DEV_PSTATE                      | 1
fan.speed [%]                                    | DCGM_FI_DEV_FAN_SPEED                   | 1
pcie.link.gen.max                                | DCGM_FI_DEV_PCIE_MAX_LINK_GEN           | 1
pcie.link.gen.current                            | DCGM_FI_DEV_PCIE_LINK_GEN               | 1
pcie.link.width.max                              | DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH         | 1
pcie.link.width.current                          | DCGM_FI_DEV_PCIE_LINK_WIDTH             | 1
ecc.errors.corrected.volatile.total              | DCGM_FI_DEV_ECC_SBE_VOL_TOTAL           | 1
ecc.errors.uncorrected.volatile.total            | DCGM_FI_DEV_ECC_DBE_VOL_TOTAL           | 1
ecc.errors.corrected.aggregate.total             | DCGM_FI_DEV_ECC_SBE_AGG_TOTAL           | 1
ecc.errors.uncorrected.aggregate.total           | DCGM_FI_DEV_ECC_DBE_AGG_TOTAL           | 1
retired_pages.single_bit_ecc.count               | DCGM_FI_DEV_RETIRED_SBE                 | 1
retired_pages.double_bit.count                   | DCGM_FI_DEV_RETIRED_DBE                 | 1
retired_pages.pending                            | DCGM_FI_DEV_RETIRED_PENDING             | 1
remapped_rows.correctable                        | DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS   | 1
remapped_rows.uncorrectable                      | DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS | 1
remapped_rows.pending                            | DCGM_FI_DEV_ROW_REMAP_PENDING           | 1
remapped_rows.failure                            | DCGM_FI_DEV_ROW_REMAP_FAILURE           | 1
gpu_recovery_action                              | gpu_recovery_action                     | 1
"""

# Path in -q; metric.
TOLD = {
    "BAR1 Memory Usage/Total": "DCGM_FI_DEV_BAR1_TOTAL",
    "BAR1 Memory Usage/Used": "DCGM_FI_DEV_BAR1_USED",
    "BAR1 Memory Usage/Free": "DCGM_FI_DEV_BAR1_FREE",
    "PCI/Replays Since Reset": "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
    "GPU Virtualization Mode/Virtualization Mode": "DCGM_FI_DEV_VIRTUAL_MODE",
}
INSTANCE = {
    "Shared FB Memory Usage/Total": "DCGM_FI_DEV_FB_TOTAL",
    "Shared FB Memory Usage/Used": "DCGM_FI_DEV_FB_USED",
    "Shared FB Memory Usage/Free": "DCGM_FI_DEV_FB_FREE",
    "Shared FB Memory Usage/Reserved": "DCGM_FI_DEV_FB_RESERVED",
}
# What the rows of MIG instances show, the board's row leaves out: our own series have it, where there is one.
OF_THE_BOARD = {
    "DCGM_FI_DEV_FB_TOTAL": "gpu_memory_total_bytes",
    "DCGM_FI_DEV_FB_USED": "gpu_memory_used_bytes",
}
NOT_OF_AN_INSTANCE = ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_UTIL")
TEXTS = {
    "name": "modelName",
    "uuid": "UUID",
    "pci.bus_id": "pci_bus_id",
    "index": "gpu",
    "driver_version": "DCGM_FI_DRIVER_VERSION",
    "serial": "DCGM_FI_DEV_SERIAL",
    "vbios_version": "DCGM_FI_DEV_VBIOS_VERSION",
    "inforom.img": "DCGM_FI_DEV_INFOROM_IMAGE_VER",
    "inforom.oem": "DCGM_FI_DEV_OEM_INFOROM_VER",
    "inforom.ecc": "DCGM_FI_DEV_ECC_INFOROM_VER",
    "inforom.pwr": "DCGM_FI_DEV_POWER_INFOROM_VER",
}
WORDS = {"No": 0.0, "None": 0.0, "Yes": 1.0, "Pass-Through": 1.0}

Labels = Mapping[str, str]
Page = dict[str, list[tuple[Labels, float]]]


@dataclass(slots=True)
class Tally:
    """What was compared; ``rounded`` counts MiB that differ by one."""

    equal: int = 0
    absent: int = 0
    rounded: int = 0
    different: list[str] = field(default_factory=list)

    @property
    def compared(self) -> int:
        """All of them."""
        return self.equal + self.absent + self.rounded + len(self.different)

    def number(self, where: str, told: str, shown: float | None, factor: float = 1.0) -> None:
        """Compare a number, or its absence."""
        expected = parse(told)
        if expected is None or shown is None:
            if expected is None and shown is None:
                self.absent += 1
            else:
                self.different.append(f"{where}: recorded {told}, exposed {'absent' if shown is None else shown}")
            return
        distance = abs(expected * factor - shown)
        if distance <= 1e-9 * max(1.0, abs(shown)):
            self.equal += 1
        elif told.endswith("MiB") and distance <= 1:
            self.rounded += 1
        else:
            self.different.append(f"{where}: recorded {told}, exposed {shown:g}")

    def text(self, where: str, told: str, shown: str | None) -> None:
        """Compare a text, or its absence."""
        if told in ("[N/A]", "N/A", ""):
            self.absent += shown is None
        else:
            self.equal += told == shown
        if (shown is not None) if told in ("[N/A]", "N/A", "") else told != shown:
            self.different.append(f"{where}: recorded {told!r}, exposed {shown!r}")


def parse(told: str) -> float | None:
    """A value as nvidia-smi prints it; ``None`` for N/A."""
    told = told.strip()
    if told in WORDS:
        return WORDS[told]
    if "N/A" in told or not told:
        return None
    if told.startswith("0x"):
        return float(int(told, 16))
    found = re.search(r"-?\d+(?:\.\d+)?", told)
    return float(found.group()) if found else None


def section(capture: str, phase: str, name: str) -> str:
    """Body of one section of a capture file."""
    match = re.search(rf"# {phase} :: {re.escape(name)}.*?\n#+\n(.*?)(?=\n\n#####|\Z)", capture, re.DOTALL)
    if match is None:
        raise SystemExit(f"the capture has no section {phase} :: {name}")
    return match.group(1)


def rows(body: str) -> list[dict[str, str]]:
    """A csv section."""
    return list(csv.DictReader(body.strip().splitlines(), skipinitialspace=True))


def tree(body: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The -q section as ``parent/key``: the board's, and each MIG device's."""
    board: dict[str, str] = {}
    devices: list[dict[str, str]] = []
    parents: list[tuple[int, str]] = []
    for line in body.splitlines():
        indent = len(line) - len(line.lstrip())
        key, colon, value = (part.strip() for part in line.partition(" : "))
        if not key:
            continue
        parents = [parent for parent in parents if parent[0] < indent]
        if key == "MIG Device":
            devices.append({})
        into = devices[-1] if any(parent[1] == "MIG Device" for parent in parents) else board
        if colon:
            into["/".join([*(parent[1] for parent in parents[-1:]), key])] = value
        else:
            parents.append((indent, key))
    return board, devices


def metrics() -> list[tuple[str, str, float]]:
    """(field of --query-gpu, metric, factor)."""
    table = [[cell.strip() for cell in line.split("|")] for line in QUERIED.strip().splitlines()]
    return [(asked, metric, float(factor)) for asked, metric, factor in table]


def options() -> ExpositionOptions:
    """Everything that is compared, as a collectors file would ask for it."""
    wanted = [metric for _, metric, _ in metrics()] + [*TOLD.values(), *INSTANCE.values()]
    numbers = [f"{name}, gauge, x" for name in dict.fromkeys(wanted) if name.startswith("DCGM_")]
    texts = [f"{name}, label, x" for name in TEXTS.values() if name.startswith("DCGM_")]
    collectors = collectors_file.parse("\n".join([*numbers, *texts]), "capture_compare")
    return ExpositionOptions(collectors=collectors)


def exposed(name: str, at_seconds: float, directory: Path) -> Page:
    """The agent's page of a scenario at one instant, through the real binding."""
    loaded, now = scenario.load(name), at_seconds - 1.0
    driver.install(lambda: loaded.at(now), cache_seconds=0.0)
    shown = options()
    source = NvmlSource(shown.collectors.fields)
    source.open()
    try:
        source.sample(EPOCH + now)
        now = at_seconds
        reading = source.sample(EPOCH + now)
    finally:
        source.close()
        driver.uninstall()
    truth = loaded.at(now)
    write_filesystem(truth, directory / "proc", directory / "pods")
    attributor = Attributor(
        kubelet=None, pids=PidResolver(directory / "proc"), names=PodNames(directory / "pods"), expiry_seconds=60
    )
    viewer = Viewer(attributor=attributor, clock=IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=10))
    containers = tuple(
        ContainerAllocation(
            namespace=h.namespace,
            pod=h.pod,
            container=h.container,
            devices=(DeviceIds(resource=h.resource, ids=h.device_ids),),
        )
        for h in truth.holders
    )
    attribution = attribute(
        allocations=Allocations(answered_at_seconds=EPOCH + now, containers=containers),
        gpus=[gpu.gpu for gpu in reading.gpus],
        instances=[part.instance for gpu in reading.gpus for part in gpu.instances],
        now=EPOCH + now,
        expiry_seconds=60,
    )
    snapshot = Snapshot(
        taken_at_seconds=EPOCH + now,
        node=loaded.node,
        simulated=True,
        driver_version=reading.driver_version,
        nvml_version=reading.nvml_version,
        devices=viewer.views(reading, attribution, {}, EPOCH + now),
        attribution_known=True,
    )
    text = render(families(snapshot, shown), openmetrics=False).decode()
    page: Page = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            page.setdefault(sample.name, []).append((sample.labels, sample.value))
    return page


def value(page: Page, metric: str, instance: str | None = None) -> float | None:
    """The one value of a metric on the board, or on an instance."""
    own = "GPU_I_ID" if metric.startswith("DCGM_") else "gpu_instance"
    found = [number for labels, number in page.get(metric, []) if labels.get(own) == instance]
    if len(found) > 1:
        raise SystemExit(f"{metric} stands {len(found)} times on the page")
    return found[0] if found else None


def compare(capture: str, phase: str, page: Page, tally: Tally) -> None:
    """One phase of one capture against one page."""
    told = rows(section(capture, phase, "query-gpu (csv"))[0]
    board, devices = tree(section(capture, phase, "query (-q)"))
    for asked, metric, factor in metrics():
        if asked not in told:
            tally.different.append(f"{phase} {asked}: not in the recording under this name and unit")
            continue
        if not devices or metric not in INSTANCE.values():
            tally.number(f"{phase} {metric} ({asked})", told[asked], value(page, metric), factor)
            continue
        tally.number(f"{phase} board's {metric} ({asked})", "N/A", value(page, metric))
        if own := OF_THE_BOARD.get(metric):
            tally.number(f"{phase} {own} ({asked})", told[asked], value(page, own), MIB)
    for path, metric in TOLD.items():
        tally.number(f"{phase} {metric} ({path})", board[path], value(page, metric))
    labels = next(labels for labels, _ in page["DCGM_FI_DEV_GPU_TEMP"])
    for asked, label in TEXTS.items():
        tally.text(f"{phase} label {label} ({asked})", told[asked], labels.get(label))
    instances(phase, devices, page, tally)


def instances(phase: str, devices: Iterable[Mapping[str, str]], page: Page, tally: Tally) -> None:
    """The MIG rows: as many, with the same ids, with their own memory, and with nothing of the board's."""
    ids = []
    for device in devices:
        number = device["MIG Device/GPU Instance ID"]
        ids.append(number)
        for path, metric in INSTANCE.items():
            tally.number(f"{phase} GI {number} {metric}", device[path], value(page, metric, number))
        for metric in NOT_OF_AN_INSTANCE:
            tally.number(f"{phase} GI {number} {metric}", "N/A", value(page, metric, number))
    shown = [labels["GPU_I_ID"] for labels, _ in page["DCGM_FI_DEV_FB_USED"] if "GPU_I_ID" in labels]
    tally.text(f"{phase} GPU instances", ",".join(ids), ",".join(shown) or None)


def reports(captures: Path) -> Iterator[Tally]:
    """Compare every capture and say what came out."""
    for name, file in CAPTURES.items():
        capture = (captures / file).read_text(encoding="utf-8")
        tally = Tally()
        for phase, at_seconds in PHASES.items():
            with tempfile.TemporaryDirectory() as directory:
                compare(capture, phase, exposed(name, at_seconds, Path(directory)), tally)
        print(
            f"{name}: {tally.compared} fields compared, {len(tally.different)} differences ({tally.equal} equal, "
            f"{tally.absent} N/A and absent, {tally.rounded} equal but for rounding to MiB)"
        )
        for line in tally.different:
            print(f"  {line}")
        yield tally


def main() -> int:
    """Compare and report; exit code 1 on any difference."""
    parser = argparse.ArgumentParser(description="Compare the capture scenarios with the recordings.")
    parser.add_argument("--captures", type=Path, default=Path("../shared/captures"), help="folder with the recordings")
    arguments = parser.parse_args()
    missing = [file for file in CAPTURES.values() if not (arguments.captures / file).is_file()]
    if missing:
        print(f"capture comparison: skipped, {arguments.captures / missing[0]} is not there (give --captures)")
        return 0
    tallies = list(reports(arguments.captures))
    return int(any(tally.different for tally in tallies))


if __name__ == "__main__":
    raise SystemExit(main())
