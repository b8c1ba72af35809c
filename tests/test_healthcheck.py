"""The image's health check in separate networks with a real agent; test_image.py runs it in an image."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from agent_support import ROOT, AgentProcess, running_agent

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None,
    reason="needs root, unshare and nsenter for a network namespace",
)

CHECK = ROOT / "deploy" / "image" / "healthcheck.py"
# As in container engines: the loopback interface is up; Docker before 26 removes ::1 from it without an IPv6 network.
LOOPBACK = """
import fcntl, os, pathlib, socket, struct, sys
for name in ("all", "lo"):
    pathlib.Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text(sys.argv[1])
with socket.socket() as any_socket:
    SIOCSIFFLAGS, IFF_UP = 0x8914, 1
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextlib.contextmanager
def agent(listen: str, ipv6: str) -> Iterator[AgentProcess]:
    """Run an agent in a separate network."""
    prefix = ("unshare", "--net", sys.executable, "-c", LOOPBACK, "1" if ipv6 == "off" else "0")
    with running_agent("--simulate", "t4-timeslicing", "--listen", listen, prefix=prefix) as one:
        yield one


def check(pid: int) -> tuple[int, str]:
    """Return exit code and output of the health check in the network of a process."""
    command = ["nsenter", "--net", f"--target={pid}", sys.executable, "-IS", str(CHECK)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize(("listen", "ipv6"), [(":0", "off"), (":0", "on"), ("[::1]:0", "on")])
def test_running_agent_is_healthy_with_and_without_ipv6(listen: str, ipv6: str) -> None:
    with agent(listen, ipv6) as one:
        assert check(one.process.pid) == (0, "")
