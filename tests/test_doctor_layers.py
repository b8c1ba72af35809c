"""The doctor on layers: numbers of GPUs on the bus, in the driver, in NVML and the kubelet, and external holders."""

import tempfile
import time
from pathlib import Path

import pytest
from join_support import attributor
from outside_support import Proc, gpu, reading, whole
from page_support import configured

from exporter.agent.run import attributor_of
from exporter.attribution.tenants import TenantSource
from exporter.config import AgentConfig, load_agent
from exporter.doctor import checks, kubernetes
from exporter.doctor.findings import Finding, Level, Surroundings
from exporter.model.attribution import Allocations, Attribution, ContainerAllocation, DeviceIds, Unresolved
from exporter.model.devices import GpuReading, Reading

UNKNOWN = Attribution(known=False)


def settings(**changes: object) -> AgentConfig:
    return configured(load_agent({}, {}, check_paths=False), **changes)


def pci(sys_root: Path, address: str, *, vendor: str = "0x10de", kind: str = "0x030200", driver: str = "") -> None:
    device = sys_root / "bus" / "pci" / "devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    if driver:
        (device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")


def test_pci_count_excludes_other_vendors_functions_and_passed_through_gpus(tmp_path: Path) -> None:
    assert checks.on_bus(tmp_path) is None
    pci(tmp_path, "0000:17:00.0", driver="nvidia")
    pci(tmp_path, "0000:18:00.0")
    pci(tmp_path, "0000:19:00.0", kind="0x030000", driver="nvidia")
    pci(tmp_path, "0000:19:00.1", kind="0x040300")  # its sound device
    pci(tmp_path, "0000:1a:00.0", kind="0x068000")  # a switch
    pci(tmp_path, "0000:1b:00.0", driver="vfio-pci")
    pci(tmp_path, "0000:00:02.0", vendor="0x8086", kind="0x030000")
    (tmp_path / "bus" / "pci" / "devices" / "0000:1c:00.0").mkdir()
    assert checks.on_bus(tmp_path) == 3


def test_driver_gpus_are_counted_unless_a_container_mount_hides_them(tmp_path: Path) -> None:
    assert checks.in_driver(tmp_path) is None
    for address in ("0000:17:00.0", "0000:18:00.0"):
        (tmp_path / "driver" / "nvidia" / "gpus" / address).mkdir(parents=True)
    assert checks.in_driver(tmp_path) == 2
    (tmp_path / "self").mkdir()
    mounted = f"36 35 0:32 / {tmp_path}/driver/nvidia rw,nosuid - tmpfs tmpfs rw\n"
    (tmp_path / "self" / "mountinfo").write_text("35 1 0:31 / /proc rw - proc proc rw\n" + mounted)
    assert checks.in_driver(tmp_path) is None


def allocations(held: str, *allocatable: str) -> Allocations:
    return Allocations(
        answered_at_seconds=1.0,
        containers=(
            ContainerAllocation(
                namespace="ml",
                pod="p",
                container="c",
                devices=(DeviceIds(resource="nvidia.com/gpu", ids=(held,)),),
            ),
        ),
        allocatable=(DeviceIds(resource="nvidia.com/gpu", ids=allocatable),),
    )


def agreement(
    seen: Reading | None,
    attribution: Attribution = UNKNOWN,
    answer: Allocations | None = None,
    *,
    on_bus: int | None = None,
    in_driver: int | None = None,
) -> Finding:
    """Return the finding for a node with these numbers on the bus and in the driver; ``None``: unknown."""
    with tempfile.TemporaryDirectory() as folder:
        proc_root, sys_root = Path(folder, "proc"), Path(folder, "sys")
        for number in range(on_bus or 0):
            pci(sys_root, f"0000:{number:02x}:00.0")
        for number in range(in_driver or 0):
            (proc_root / "driver" / "nvidia" / "gpus" / f"0000:{number:02x}:00.0").mkdir(parents=True)
        config = settings(proc_root=proc_root)
        node = Surroundings(config=config, wall=time.time, monotonic=time.monotonic, sys_root=sys_root)
        return checks.layer_agreement(node, seen, attribution, answer)


def judged(
    answer: Allocations | None, *gpus: GpuReading, on_bus: int | None = None, in_driver: int | None = None
) -> Finding:
    seen = reading(*gpus)
    attribution = attributor(settings(), answer).join(seen, 1.0, 0.0)
    return agreement(seen, attribution, answer, on_bus=on_bus, in_driver=in_driver)


def test_layer_that_lost_a_gpu_is_named() -> None:
    ids = (gpu(0).uuid, gpu(1).uuid)
    both = (whole(0), whole(1))
    assert judged(allocations(ids[0], *ids), *both, on_bus=2, in_driver=2).level is Level.OK
    driver = judged(allocations(ids[0], *ids), *both, on_bus=3, in_driver=2)
    assert (driver.level, driver.cause.partition(":")[0]) == (Level.FAIL, "driver")
    toolkit = judged(allocations(ids[0], *ids), whole(0), on_bus=2, in_driver=2)
    assert (toolkit.level, toolkit.cause.partition(":")[0]) == (Level.FAIL, "container toolkit")
    plugin = judged(allocations(ids[0], ids[0]), *both)
    assert (plugin.level, plugin.cause.partition(":")[0]) == (Level.WARN, "device plugin")
    registered = judged(allocations(ids[0]), *both)
    assert (registered.level, registered.cause.partition(":")[0]) == (Level.WARN, "kubelet")
    assert judged(None, *both).level is Level.OK


def test_broken_driver_and_unloaded_driver_are_distinguished() -> None:
    shown = agreement(None, on_bus=8, in_driver=8)
    assert (shown.level, shown.cause.partition(":")[0]) == (Level.FAIL, "container toolkit")
    missing = agreement(None, on_bus=8, in_driver=None)
    assert "no driver is loaded" in missing.cause
    nothing = agreement(None, on_bus=None, in_driver=None)
    assert "0 GPUs" not in nothing.cause, "without NVML there is no number"


def test_allocated_device_missing_from_the_driver_is_named() -> None:
    config, seen = settings(), reading(whole(0))
    good = attributor(config, allocations(gpu(0).uuid)).join(seen, 1.0, 0.0)
    gone = attributor(config, allocations(gpu(5).uuid)).join(seen, 1.0, 0.0)
    assert kubernetes.agreement(good).level is Level.OK
    finding = kubernetes.agreement(gone)
    assert (finding.level, "ml/p" in finding.cause, "layers" in finding.fix) == (Level.WARN, True, True)


@pytest.mark.parametrize(
    ("reason", "level", "fix"),
    [
        ("dra_passed_through", Level.OK, ""),
        ("bad_annotation", Level.WARN, "annotation"),
        ("claim_pending", Level.WARN, "check of the API"),
        ("reservation_pending", Level.WARN, "check of the API"),
    ],
)
def test_unresolved_device_has_a_fix_and_a_passed_through_gpu_needs_none(reason: str, level: Level, fix: str) -> None:
    one = Unresolved(namespace="ml", pod="p", container="m", resource="gpu", device_id="x", reason=reason)
    finding = kubernetes.agreement(Attribution(known=True, unresolved=(one,)))
    assert (finding.level, fix in finding.fix) == (level, True)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    made = Proc(tmp_path / "proc")
    made.add(42, "0::/system.slice/slurmstepd.scope/job_7/step_0\n")
    return made


def workload_holders(config: AgentConfig, seen: Reading | None) -> Finding:
    source = attributor_of(config).kubelet
    assert isinstance(source, TenantSource)
    return kubernetes.workload_holders(config, source, seen, 1.0)


def test_holders_outside_kubernetes_are_reported_with_their_source(proc: Proc, tmp_path: Path) -> None:
    slurm = settings(workload_manager="slurm", proc_root=proc.root)
    assert "slurm: 1 hold devices, by their processes" in workload_holders(slurm, reading(whole(0, 42))).cause
    proc.add(44, "0::/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0\n")
    finding = workload_holders(slurm, reading(whole(0, 44)))
    assert (finding.level, "by SLUID" in finding.cause) == (Level.WARN, True)
    assert "CgroupJobIdPaths=yes" in (finding.fix or "")
    host = configured(slurm, workload_manager="host")
    assert "host: 1 hold devices" in workload_holders(host, reading(whole(0, 42))).cause
    mapped = configured(slurm, job_mapping_dir=tmp_path / "none")
    finding = workload_holders(mapped, reading(whole(0, 42)))
    assert (finding.level, str(tmp_path / "none") in finding.cause, "prolog" in finding.fix) == (
        Level.WARN,
        True,
        True,
    )
    (tmp_path / "none").mkdir()
    assert workload_holders(mapped, reading(whole(0, 42))).cause.startswith("slurm: 0 hold devices, by the mapping")
    assert workload_holders(slurm, None).level is Level.WARN
