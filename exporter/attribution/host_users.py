"""Users and systemd units as holders, on a host where nothing allocates: whoever runs on a device holds it."""

import re
from pathlib import Path

from exporter.attribution.host_processes import HostProcess, HostProcesses, UserNames
from exporter.attribution.processes import NO_POD
from exporter.attribution.tenants import HOST, RENEW_SECONDS, Register, Registered, RunningTenants, Tenant
from exporter.model import Owner, PodFacts, Reading

NAMESPACE = "host"

_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?=\.scope|/|$)", re.ASCII)
_LOGIN = re.compile(r"/user-(?P<user>[0-9]{1,10})\.slice(?=/|$)", re.ASCII)
_MANAGER = re.compile(r"user@[0-9]+\.service", re.ASCII)
# Named by systemd-run or by a desktop, another one at each start: they say nothing of whose they are.
_TRANSIENT = re.compile(r"(?:run-[rup]?[0-9a-f]+(?:-i[0-9]+)?|app-.*)\.service", re.ASCII)
_ID_SHOWN = 12
# The driver's and the display's own, as long as root runs them: they use a GPU on behalf of others.
_INFRASTRUCTURE = frozenset(
    {"Xorg", "Xwayland", "nvidia-cuda-mps", "nvidia-persiste", "nv-hostengine", "nv-fabricmanage", "dcgm-exporter"}
)


class HostUsers(Registered):
    """Keeps who holds what on a host without a workload manager, in the form of a kubelet's answer.

    Args:
        proc_root: The host's ``/proc``, or where it is mounted.
    """

    def __init__(self, *, proc_root: Path) -> None:
        self._processes = HostProcesses(proc_root)
        self._users = UserNames(proc_root)
        self._register = Register()
        self._running = RunningTenants(self._register, HOST, self._tenant_of, lives=self._processes.lives)
        self._read_at: float | None = None

    def observe(self, reading: Reading, now: float) -> None:
        """Take a reading in.

        Args:
            reading: The newest one.
            now: Unix time.
        """
        if self._read_at is None or not 0 <= now - self._read_at < RENEW_SECONDS:
            self._read_at = now
            self._users.follow()
        self._running.observe(reading, now)

    def _tenant_of(self, pid: int) -> Tenant | str | None:
        process = self._processes.look(pid)
        if process is None:
            return None
        kind, name, user_id = tenant_of(process)
        if not kind or (process.command in _INFRASTRUCTURE and process.user_id == 0):
            return NO_POD
        user = "" if user_id is None else self._users.name_of(user_id)
        if kind == "User":
            name = user
        elif user:
            name = f"{user}/{name}"  # two users may have a unit of one name
        # Not looked up by its kind and number: the name of a user may be told later than the user.
        key = f"{kind.lower()}:{name}"
        tenant = self._register.get(key)
        if tenant is None:
            owner = Owner(namespace=NAMESPACE, kind=kind, name=name, team=user)
            tenant = Tenant(key=key, namespace=NAMESPACE, name=name, facts=PodFacts(owner=owner))
            self._register.enter(tenant)
        return tenant


def tenant_of(process: HostProcess) -> tuple[str, str, int | None]:
    """Tell who runs a process.

    Returns:
        Kind, name and user id: ``Container`` by the first digits of its id, ``SystemdUnit`` by its name, both with the
        user where they are a user's own; else ``User`` without a name: who has logged in, or whose the process is. An
        empty kind where not even that is told.
    """
    for line in process.cgroup.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in {"", "name=systemd"} and not _CONTAINER.search(path):
            continue  # of cgroup v1, where only systemd's own hierarchy is sure to have every unit
        login = _LOGIN.search(path)
        user_id = int(login["user"]) if login else None
        if container := _CONTAINER.search(path):
            return "Container", container[1][:_ID_SHOWN], user_id  # below a user's slice the user makes the names
        for part in reversed(path.split("/")):
            if part.endswith(".service") and not _MANAGER.fullmatch(part) and not _TRANSIENT.fullmatch(part):
                return "SystemdUnit", part, user_id
        if user_id is not None:
            return "User", "", user_id
    return ("User", "", process.user_id) if process.user_id is not None else ("", "", None)
