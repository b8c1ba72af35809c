import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.attribution.device_ids import IdKind, ParsedId, comparable_profile, parse, parse_claimed

GPU = "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763"
MIG = "MIG-2ce7a541-c516-5dbc-a76e-26cc100d9b55"
LEGACY = f"MIG-{GPU}/3/0"

WHOLE = ParsedId(kind=IdKind.GPU, uuid=GPU)
UNKNOWN = ParsedId(kind=IdKind.UNKNOWN, reason="unknown_form")
PLACEHOLDER = ParsedId(kind=IdKind.NEEDS_ANNOTATION, uuid=GPU, reason="needs_annotation")
NAMELESS = ParsedId(kind=IdKind.NEEDS_ANNOTATION, reason="needs_annotation")


def legacy(replica: int | None = None) -> ParsedId:
    return ParsedId(kind=IdKind.LEGACY_MIG, uuid=GPU, gpu_instance_id=3, compute_instance_id=0, replica=replica)


def minor(number: int, gi: int | None = None, replica: int | None = None) -> ParsedId:
    ci = None if gi is None else 0
    return ParsedId(kind=IdKind.MINOR, minor=number, gpu_instance_id=gi, compute_instance_id=ci, replica=replica)


@pytest.mark.parametrize(
    ("resource", "device_id", "expected"),
    [
        # 1 to 4: NVIDIA's plugin
        ("nvidia.com/gpu", GPU, WHOLE),
        ("nvidia.com/gpu", GPU.upper(), WHOLE),
        ("nvidia.com/gpu", MIG, ParsedId(kind=IdKind.MIG, uuid=MIG)),
        ("nvidia.com/mig-1g.10gb", MIG, ParsedId(kind=IdKind.MIG, uuid=MIG)),
        ("nvidia.com/mig-1g.5gb", LEGACY, legacy()),
        ("nvidia.com/gpu", f"{GPU}::0", ParsedId(kind=IdKind.GPU, uuid=GPU, replica=0)),
        ("nvidia.com/gpu.shared", f"{GPU}::15", ParsedId(kind=IdKind.GPU, uuid=GPU, replica=15)),
        ("nvidia.com/mig-1g.10gb.shared", f"{MIG}::7", ParsedId(kind=IdKind.MIG, uuid=MIG, replica=7)),
        ("nvidia.com/gpu", f"{LEGACY}::2", legacy(2)),
        # 5: WSL and Tegra
        ("nvidia.com/gpu", "all", ParsedId(kind=IdKind.ALL)),
        ("nvidia.com/gpu", "tegra", ParsedId(kind=IdKind.ALL)),
        # 6 to 8: GKE
        ("nvidia.com/gpu", "nvidia0", minor(0)),
        ("nvidia.com/gpu", "nvidia12", minor(12)),
        ("nvidia.com/gpu", "nvidia0/gi3", minor(0, 3)),
        ("nvidia.com/gpu", "nvidia0/vgpu1", minor(0, None, 1)),
        ("nvidia.com/gpu", "nvidia1/gi0/vgpu2", minor(1, 0, 2)),
        # 9 and 10: HAMi, volcano-vgpu
        ("nvidia.com/gpu", f"{GPU}-3", PLACEHOLDER),
        ("volcano.sh/vgpu-number", f"{GPU}-3", PLACEHOLDER),
        ("volcano.sh/vgpu-memory", f"{GPU}-memory-812", PLACEHOLDER),
        ("volcano.sh/vgpu-cores", f"{GPU}-core-7", PLACEHOLDER),
        # 11: volcano-sh/devices
        ("volcano.sh/gpu-memory", "0-17", NAMELESS),
        ("volcano.sh/gpu-number", "1-0", NAMELESS),
        # 12 to 14: AliCloud, AWS, Tencent
        ("aliyun.com/gpu-mem", f"{GPU}-_-5", PLACEHOLDER),
        ("k8s.amazonaws.com/vgpu", f"{GPU}-4", ParsedId(kind=IdKind.GPU, uuid=GPU, replica=4)),
        ("tencent.com/vcuda-core", "tencent.com/vcuda-core-12", NAMELESS),
        ("tencent.com/vcuda-memory", "tencent.com/vcuda-memory-268435456-3", NAMELESS),
        # similar ids of no known form
        ("nvidia.com/gpu", "", UNKNOWN),
        ("nvidia.com/gpu", "0-17", UNKNOWN),
        ("nvidia.com/gpu", f"x{GPU}", UNKNOWN),
        ("nvidia.com/gpu", f"{GPU}\n", UNKNOWN),
        ("nvidia.com/gpu", f"{GPU}::", UNKNOWN),
        ("nvidia.com/gpu", f"{GPU}::1::2", UNKNOWN),
        ("nvidia.com/gpu", f"{GPU}/vgpu1", UNKNOWN),
        ("nvidia.com/gpu", f"{GPU}::-1", UNKNOWN),
        ("nvidia.com/gpu", f"{GPU}::٣", UNKNOWN),
        ("nvidia.com/gpu", GPU[:-1], UNKNOWN),
        ("nvidia.com/gpu", "nvidia0::1", UNKNOWN),
        ("nvidia.com/gpu", "Nvidia0", UNKNOWN),
        ("nvidia.com/gpu", "nvidia", UNKNOWN),
        ("nvidia.com/gpu", "nvidia0/gi", UNKNOWN),
        ("nvidia.com/gpu", "nvidia" + "9" * 5000, UNKNOWN),
        ("nvidia.com/gpu", f"MIG-{GPU}/3", UNKNOWN),
    ],
)
def test_device_id_of_every_plugin_is_parsed(resource: str, device_id: str, expected: ParsedId) -> None:
    assert parse(resource, device_id) == expected


@pytest.mark.parametrize(
    ("driver", "device", "expected"),
    [
        ("gpu.nvidia.com", "gpu-3", minor(3)),
        (
            "gpu.nvidia.com",
            "gpu-2-mig-1g24gb-19-0",
            ParsedId(kind=IdKind.MINOR_PROFILE, minor=2, profile="1g24gb", profile_id=19, placement_start=0),
        ),
        ("gpu.nvidia.com", "gpu-2-mig-19-0-1", ParsedId(kind=IdKind.UNKNOWN, minor=2, reason="dra_unresolved")),
        ("gpu.nvidia.com", "gpu-vfio-0", ParsedId(kind=IdKind.UNKNOWN, reason="dra_passed_through")),
        ("gpu.nvidia.com", "gpu-x", ParsedId(kind=IdKind.UNKNOWN, reason="dra_unresolved")),
        ("compute-domain.nvidia.com", "channel-0", None),
        ("nic.example.com", "gpu-0", None),
    ],
)
def test_claimed_device_name_is_parsed_only_as_far_as_reliable(
    driver: str, device: str, expected: ParsedId | None
) -> None:
    assert parse_claimed(driver, device) == expected


def test_spellings_of_one_mig_profile_compare_equal() -> None:
    assert comparable_profile("1g.10gb+me") == comparable_profile("1g10gb-me") == "1g10gbme"


@settings(deadline=None)  # a busy machine is not an error
@given(st.text(), st.text())
def test_arbitrary_text_does_not_fail(resource: str, device_id: str) -> None:
    assert parse(resource, device_id).kind in IdKind
    parse_claimed("gpu.nvidia.com", device_id)


NEAR = st.from_regex(r"(GPU-|MIG-|MIG-GPU-|nvidia)[0-9a-f-]{0,40}(::|/gi|/vgpu|/|-_-|-)?[0-9]{0,12}")


@settings(deadline=None)  # a busy machine is not an error
@given(st.sampled_from(["nvidia.com/gpu", "k8s.amazonaws.com/vgpu", "aliyun.com/gpu-mem"]), NEAR)
def test_id_without_a_device_always_has_a_reason(resource: str, device_id: str) -> None:
    parsed = parse(resource, device_id)
    assert bool(parsed.reason) == (parsed.kind in (IdKind.UNKNOWN, IdKind.NEEDS_ANNOTATION))
