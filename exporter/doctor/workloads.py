"""Checks of who holds devices outside Kubernetes: Slurm's job mapping or cgroups, or whoever runs there."""

from exporter.attribution.host_users import HostUsers
from exporter.attribution.slurm import SlurmJobs
from exporter.config import AgentConfig
from exporter.doctor.finding import Finding, ok, warn
from exporter.model import Reading

_NAME = "workload manager"


def holders(config: AgentConfig, reading: Reading | None, now: float) -> Finding:
    """What the agent would say now of who holds devices.

    Args:
        config: Says which manager.
        reading: ``None`` where NVML does not work.
        now: Unix time.
    """
    manager, mapping = config.workload_manager, config.job_mapping_dir
    if reading is None:
        return warn(_NAME, f"{manager}: nothing can be told without the driver", "mend the driver first")
    jobs: SlurmJobs | HostUsers
    if manager == "slurm":
        jobs = SlurmJobs(mapping_dir=mapping, proc_root=config.proc_root)
    else:
        jobs = HostUsers(proc_root=config.proc_root)
    jobs.observe(reading, now)
    if jobs.problem:
        cause, _, mend = jobs.problem.partition("; ")
        return warn(_NAME, f"{manager}: {cause}", mend)
    count = len(jobs.latest.containers) if jobs.latest else 0
    how = f"by the mapping in {mapping}" if manager == "slurm" and mapping else "by who runs on them"
    idle = "" if manager == "slurm" and mapping else "; a device that is held and not used is taken for free"
    return ok(_NAME, f"{manager}: {count} hold devices, {how}{idle}")
