"""A ``/proc`` made by a test, and readings of GPUs whose processes are in it."""

from dataclasses import dataclass
from pathlib import Path

from exporter.attribution.join import attribute
from exporter.model.attribution import Allocations, AllocationState, Attribution, Holder
from exporter.model.devices import DeviceState, Gpu, GpuReading, MigInstance, MigReading, ProcessUse, Reading

DIGITS = "1111-2222-3333-444444444444"


@dataclass(frozen=True)
class Proc:
    """A fake ``/proc``."""

    root: Path

    def add(
        self, pid: int, cgroup: str, *, user: int = 1000, started: int = 5, comm: str = "python3", status: str = ""
    ) -> None:
        directory = self.root / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "stat").write_text(f"{pid} ({comm}) S 1 " + "0 " * 17 + f"{started} 0 0\n")
        (directory / "cgroup").write_text(cgroup)
        (directory / "status").write_text(status or f"Name:\t{comm}\nUid:\t{user}\t{user}\t{user}\t{user}\n")

    def end(self, pid: int) -> None:
        for path in (self.root / str(pid)).iterdir():
            path.unlink()
        (self.root / str(pid)).rmdir()

    def users(self, text: str) -> None:
        passwd = self.root / "1" / "root" / "etc" / "passwd"
        passwd.parent.mkdir(parents=True)
        passwd.write_text(text)


def gpu(index: int, *, mig: bool = False) -> Gpu:
    return Gpu(
        uuid=f"GPU-0000000{index}-{DIGITS}",
        index=index,
        minor=index,
        model="NVIDIA A100-SXM4-80GB",
        pci_bus_id=f"00000000:0{index + 1}:00.0",
        mig_enabled=mig,
        compute_slices=7,
        memory_slices=8,
    )


def uses(*pids: int) -> tuple[ProcessUse, ...]:
    return tuple(ProcessUse(pid=pid, memory_used_bytes=1) for pid in pids)


def whole(index: int, *pids: int, state: DeviceState = DeviceState.UP) -> GpuReading:
    return GpuReading(gpu=gpu(index), state=state, processes=uses(*pids))


def partitioned(index: int, **pids: tuple[int, ...]) -> GpuReading:
    """Make a partitioned GPU with instances ``gi1=(pids...)`` of one slice each."""
    return GpuReading(
        gpu=gpu(index, mig=True),
        instances=tuple(
            MigReading(
                instance=MigInstance(
                    uuid=instance_uuid(index, int(name[2:])),
                    parent_uuid=gpu(index).uuid,
                    gpu_instance_id=int(name[2:]),
                    compute_instance_id=0,
                    profile="1g.10gb",
                    compute_slices=1,
                    memory_slices=1,
                ),
                processes=uses(*of),
            )
            for name, of in pids.items()
        ),
    )


def instance_uuid(index: int, instance: int) -> str:
    return f"MIG-{index:04d}{instance:04d}-{DIGITS}"


def reading(*gpus: GpuReading) -> Reading:
    return Reading(source="nvml", taken_at_seconds=1.0, duration_seconds=0.01, gpus=gpus)


def joined(allocations: Allocations | None, seen: Reading) -> Attribution:
    """Return the join of an answer at the time of the answer."""
    return attribute(allocations, seen.gpus) if allocations else Attribution(known=False)


def holders(allocations: Allocations | None, seen: Reading) -> dict[str, list[tuple[str, str, float]]]:
    """Return (namespace, name, share) of each device's holders."""
    found = joined(allocations, seen).holders
    return {uuid: sorted(_named(holder) for holder in of) for uuid, of in found.items()}


def state(allocations: Allocations | None, seen: Reading, index: int) -> AllocationState:
    """Return the state of a whole GPU."""
    return joined(allocations, seen).allocation(gpu(index).uuid)


def _named(holder: Holder) -> tuple[str, str, float]:
    return holder.namespace, holder.pod, round(holder.device_share_ratio, 6)
