import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.attribution.processes import pod_of

UID = "3f2a9c1e-7b4d-4e8a-9c0f-1a2b3c4d5e6f"
UID_ = UID.replace("-", "_")
STATIC = "0123456789abcdef0123456789abcdef"
CID = "ab" * 32
OUTER = "cd" * 32
POD = f"kubepods-burstable-pod{UID_}.slice"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"0::/kubepods.slice/kubepods-burstable.slice/{POD}/cri-containerd-{CID}.scope", UID),
        (f"0::/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{CID}.scope", UID),
        (f"0::/kubepods.slice/kubepods-burstable.slice/{POD}/crio-{CID}.scope", UID),
        (f"0::/kubepods.slice/kubepods-burstable.slice/{POD}/crio-{CID}.scope/container", UID),
        (f"0::/kubepods.slice/kubepods-burstable.slice/{POD}/crio-conmon-{CID}.scope", UID),
        (f"0::/kubepods.slice/kubepods-besteffort.slice/{POD}/docker-{CID}.scope", UID),
        (f"0::/kubepods/burstable/pod{UID}/{CID}", UID),
        (f"0::/kubepods/pod{UID}/{CID}", UID),
        (f"0::/kubepods/pod{UID}", UID),
        (f"12:devices:/kubepods/pod{UID}/{CID}\n1:name=systemd:/kubepods/pod{UID}/{CID}\n", UID),
        (f"12:cpuset:/\n11:memory:/kubepods/burstable/pod{UID}/{CID}\n0::/\n", UID),
        (f"12:pids:/kubepods/pod{UID}\n11:memory:/kubepods/pod{UID}/{CID}\n", UID),
        (
            f"4:memory:/system.slice/containerd.service/{POD}:cri-containerd:{CID}",
            UID,
        ),
        (
            (
                f"0::/system.slice/docker-{OUTER}.scope/kubelet.slice/kubelet-kubepods.slice/"
                f"kubelet-kubepods-burstable.slice/kubelet-{POD}/cri-containerd-{CID}.scope"
            ),
            UID,
        ),
        (
            f"0::/kubepods/pod{STATIC}/{OUTER}/kubelet/kubepods/burstable/pod{UID}/{CID}",
            UID,
        ),
        (f"0::/kubepods/burstable/pod{STATIC}/{CID}", STATIC),
        (f"0::/kubepods.slice/kubepods-pod{STATIC}.slice/cri-containerd-{CID}.scope", STATIC),
        (f"0::/kubepods.slice/{POD}/cri-containerd-{CID}.scope/init.scope", UID),
        (f"0::/kubepods.slice/{POD}/cri-containerd-{CID}.scope/docker/{OUTER}", UID),
        (f"0::/../../{POD}/cri-containerd-{CID}.scope", UID),
        (f"0::/../../../kubepods-pod{UID_}.slice/crio-{CID}.scope", UID),
        (f"0::/../../pod{UID}/{CID}", UID),
        (rf"0::/kubepods.slice/kubepods-pod{UID}.slice/cri-containerd\x2d{CID}.scope", UID),
        (f"0::/../cri-containerd-{CID}.scope", None),
        ("0::/user.slice/user-1000.slice/session-3.scope", None),
        (f"0::/system.slice/docker-{OUTER}.scope", None),
        (f"0::/kubepods/podcast{UID}/{CID}", None),
        (f"0::/kubepods/pod{UID}0/{CID}", None),
        ("0::/", None),
        ("", None),
    ],
)
def test_cgroup_of_every_runtime_and_namespace_maps_to_its_pod(text: str, expected: str | None) -> None:
    assert pod_of(text) == expected


@settings(deadline=None)  # a busy machine is not an error
@given(st.text())
def test_arbitrary_text_does_not_fail(text: str) -> None:
    pod_of(text)
