"""Pod and container out of the text of ``/proc/<pid>/cgroup``, for every runtime, cgroup version and namespace."""

import re

# "pod<uid>" is matched and never "kubepods": in a private cgroup namespace the prefix is gone.
_POD = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=\.slice|[/:]|$)", re.ASCII
)
_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?=\.scope|/|$)", re.ASCII)


def pod_of(text: str) -> tuple[str, str | None] | None:
    r"""Find the pod, and where the path tells it the container, that a process belongs to.

    The last pod of a path counts (a kubelet within a container has an outer one before it), and the first container
    behind it (a container may make cgroups of its own). On cgroup v1 any line that matches will do.

    Args:
        text: The whole file; systemd's escape ``\x2d`` is understood.

    Returns:
        Pod UID (with dashes; 32 digits without for a static pod) and container id or ``None``; ``None`` for a process
        outside every pod, or whose path does not say.
    """
    pod_only: tuple[str, None] | None = None
    for line in text.splitlines():
        path = line.split(":", 2)[-1].replace(r"\x2d", "-")
        pods = list(_POD.finditer(path))
        if not pods:
            continue
        uid = pods[-1][1].replace("_", "-")
        if container := _CONTAINER.search(path, pods[-1].end()):
            return uid, container[1]
        pod_only = pod_only or (uid, None)
    return pod_only
