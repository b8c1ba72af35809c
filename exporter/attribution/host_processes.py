"""What the host's ``/proc`` says of the processes that a driver lists: their cgroups and whose they are."""

from dataclasses import dataclass
from pathlib import Path

from exporter.attribution.proc_files import Remembered, content

_PASSWD_LIMIT_BYTES = 4 * 2**20
_PASSWD_FIELDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    """One process, as it was when it was first looked at."""

    command: str
    """At most 15 bytes of its program's name; the process may have changed it."""
    cgroup: str
    """The whole text of its cgroup file."""
    user_id: int | None
    """Real user id in the user namespace of whoever looks; ``None`` where it is not told."""


class HostProcesses(Remembered[HostProcess]):
    """Looks processes up.

    Args:
        proc_root: The host's ``/proc``, or where it is mounted.
    """

    def __init__(self, proc_root: Path) -> None:
        super().__init__(proc_root, _host_process)


class UserNames:
    """Names of the host's users, from its own passwd file.

    It is read through the root directory of the host's first process, so that a container does not tell its own users
    instead. Directories such as LDAP are not asked: that can take seconds.

    Args:
        proc_root: The host's ``/proc``, or where it is mounted.
    """

    def __init__(self, proc_root: Path) -> None:
        self._path = proc_root / "1" / "root" / "etc" / "passwd"
        self._names: dict[int, str] = {}
        self._changed_ns: int | None = None

    def name_of(self, user_id: int) -> str:
        """Return a user's name, or ``uid-<number>`` where the file does not tell it or cannot be read."""
        return self._names.get(user_id) or f"uid-{user_id}"

    def follow(self) -> None:
        """Read the file again if it has changed; what was read last stays where that cannot be done."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns == self._changed_ns:
                return
            with self._path.open("rb") as file:
                text = file.read(_PASSWD_LIMIT_BYTES).decode("utf-8", "replace")
        except OSError:
            return
        self._changed_ns = changed_ns
        self._names = {}
        for line in text.splitlines():
            fields = line.split(":")
            if len(fields) > _PASSWD_FIELDS and fields[0] and _is_number(fields[2]):
                self._names.setdefault(int(fields[2]), fields[0])


def _host_process(directory: str, name: str) -> HostProcess:
    return HostProcess(command=name, cgroup=content(f"{directory}/cgroup"), user_id=_real_user(f"{directory}/status"))


def _real_user(path: str) -> int | None:
    # Not the owner of /proc/<pid>: that is root's for a process that may not be dumped.
    try:
        status = content(path)
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("Uid:"):
            words = line.split()
            return int(words[1]) if len(words) > 1 and _is_number(words[1]) else None
    return None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10  # noqa: PLR2004 - digits of a 32-bit number
