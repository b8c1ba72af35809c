"""Determines the effective part of a device's activity and its bottleneck, from the limits of the hardware.

docs/effective.md explains the formula and its limits.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from exporter.model.fields import MOST_OF_LIMIT, PIPES, Field
from exporter.model.ledger import RESOURCES, Bottleneck, ResourceProfile

Values = Mapping[Field, int | float]

NEAR_LIMIT = 0.25
"""Minimum use of a bottleneck. With less use of every resource, a quarter of the device could do the same work."""
_NOISE = 0.05
"""Maximum difference by which noise makes a pipe busier than its engine; 0.011 was recorded on an H100."""

_BEFORE_HOPPER = re.compile(
    r"\b(P4|P40|P100|V100|V100S|T4|T40|A2|A10|A10G|A16|A30|A40|A100|A800|L2|L4|L20|L40|L40S)\b"
    r"|\bRTX (A?[2-8][05]00|[2-4]0\d0)\b"
)
"""Models whose FP32 pipe includes integer work (DCGM: "FMA, FP32 and integer"); no source has an integer pipe."""

_LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one lane in one direction by generation of PCIe, without its line code (PCI-SIG)."""
_NVLINK_BYTES = (
    (re.compile(r"\bG?B[23]00\b"), 900e9),
    (re.compile(r"\bH100 (NVL|PCIe)\b"), 300e9),
    (re.compile(r"\bH800\b"), 200e9),
    (re.compile(r"\b(H100|H200|H20|GH200)\b"), 450e9),
    (re.compile(r"\bA800\b"), 200e9),
    (re.compile(r"\bA100\b"), 300e9),
    (re.compile(r"\bA30\b"), 100e9),
    (re.compile(r"\bV100-SXM"), 150e9),
    (re.compile(r"\bP100-SXM"), 80e9),
    (re.compile(r"\b(A40|RTX A(4500|5[05]00|6000))\b"), 56.25e9),
    (re.compile(r"\bQuadro RTX [68]000\b"), 50e9),
)
"""Bytes per second of all links in one direction by model: number of links times speed, from NVIDIA's data sheets."""
_WITHOUT_NVLINK = re.compile(
    r"\b(P4|P40|T4|T40|A2|A10|A10G|A16|L2|L4|L20|L40|L40S)\b|V100S?-PCIE|P100-PCIE"
    r"|\bAda\b|RTX A[24]000|RTX PRO|GeForce RTX [45]0\d0"
)
_C2C_BYTES = 450e9
"""Bytes per second of NVLink-C2C in one direction: half of the 900 GB/s of NVIDIA's data sheets."""
_WITH_C2C = re.compile(r"\b(GH200|GB200|GB300)\b")


class _Row(NamedTuple):
    """Resources of a model that must be measured in addition to its memory and PCIe link."""

    pipes: tuple[Field, ...]
    has_nvlink: bool
    nvlink_bytes: float | None
    """Limit of NVLink in one direction; ``None`` for an unknown model."""
    c2c_bytes: float | None
    """Limit of NVLink-C2C in one direction; ``None`` for other models, whose C2C need not be measured."""


@lru_cache(maxsize=64)
def _row_of(model: str) -> _Row:
    return _Row(
        pipes=tuple(
            pipe for pipe in PIPES if pipe is not Field.PROF_PIPE_INT_ACTIVE or not _BEFORE_HOPPER.search(model)
        ),
        has_nvlink=_WITHOUT_NVLINK.search(model) is None,
        nvlink_bytes=next((limit for pattern, limit in _NVLINK_BYTES if pattern.search(model)), None),
        c2c_bytes=_C2C_BYTES if _WITH_C2C.search(model) else None,
    )


def pcie_use(values: Values) -> float | None:
    """Return the use of a GPU's PCIe link in its busier direction, as a part of the negotiated link.

    The limit is that of the current generation and width. The generation falls while the GPU is idle, and is read only
    once a minute. So a use above 1 is compared with the highest generation of GPU and slot.

    Args:
        values: Values of the whole GPU.

    Returns:
        ``None`` if the link or a direction was not measured.
    """
    sent, received = values.get(Field.PROF_PCIE_TX_BYTES), values.get(Field.PROF_PCIE_RX_BYTES)
    width = values.get(Field.PCIE_LINK_WIDTH)
    generations = [int(values.get(one, 0)) for one in (Field.PCIE_LINK_GEN, Field.PCIE_MAX_LINK_GEN)]
    limits = [_LANE_BYTES[one] * width for one in generations if one in _LANE_BYTES and width]
    if sent is None or received is None or not limits:
        return None
    use = max(sent, received) / limits[0]
    return use if use <= 1 else max(sent, received) / max(limits)


def _rate_use(values: Values, directions: tuple[Field, Field], limit: float | None) -> float | None:
    rates = [values[one] for one in directions if one in values]
    if len(rates) < len(directions):
        return None
    busier = max(rates)
    return busier / limit if limit else None if busier else 0.0


_NVLINK = (Field.PROF_NVLINK_TX_BYTES, Field.PROF_NVLINK_RX_BYTES)
_C2C = (Field.PROF_C2C_TX_ALL_BYTES, Field.PROF_C2C_RX_ALL_BYTES)


def _uses(
    model: str, values: Values, board: Values | None, pcie_ratio: float | None
) -> tuple[float, float, float] | None:
    """Return the largest use of a pipe, the use of memory, the largest use of a link; ``None`` if one is unknown."""
    row, whole = _row_of(model), values if board is None else board
    links = [pcie_ratio]
    if row.has_nvlink and board is None:
        links.append(_rate_use(values, _NVLINK, row.nvlink_bytes))
    if row.c2c_bytes or whole.keys() >= {*_C2C}:
        links.append(_rate_use(whole, _C2C, row.c2c_bytes))
    measured = [values.get(Field.PROF_DRAM_ACTIVE), *links, *(values.get(pipe) for pipe in row.pipes)]
    known = [use for use in measured if use is not None]
    if len(known) < len(measured):
        return None
    first = 1 + len(links)
    return max(known[first:]), known[0], max(known[1:first])


def profile_of(
    model: str,
    values: Values,
    board: Values | None,
    *,
    activity_ratio: float,
    video_ratio: float,
    pcie_ratio: float | None,
) -> tuple[ResourceProfile | None, bool]:
    """Return the resource profile of a device, and whether its readings are possible.

    Args:
        model: Name of the GPU as the driver reports it.
        values: Values of the device.
        board: For a MIG instance, values of the whole GPU: clocks and the PCIe link. Instances share the link, so its
            use is an upper bound. They have no NVLink (NVIDIA: no peer access under MIG). ``None`` for a whole GPU.
        activity_ratio: Activity of the device.
        video_ratio: Activity of its busiest video, JPEG or optical-flow engine.
        pcie_ratio: ``pcie_use`` of the whole GPU.

    Returns:
        No profile if one of the device's resources was not measured, or if the readings are impossible: a compute pipe
        is busier than its engine, or a resource is used above its limit.
    """
    whole, uses = values if board is None else board, _uses(model, values, board, pcie_ratio)
    engine = values.get(Field.PROF_GR_ENGINE_ACTIVE)
    clock, highest = whole.get(Field.SM_CLOCK), whole.get(Field.MAX_SM_CLOCK)
    if uses is None or engine is None or not clock or not highest:
        return None, True
    pipe, memory, transfer = uses
    if pipe > engine + _NOISE or max(uses) > MOST_OF_LIMIT:
        return None, False
    limits = pipe * min(1.0, clock / highest), memory, transfer, video_ratio  # in the order of RESOURCES
    nearest = max(limits)
    profile = ResourceProfile(
        uses=tuple(min(activity_ratio, use) for use in limits),
        bottleneck=RESOURCES[limits.index(nearest)] if nearest >= NEAR_LIMIT else Bottleneck.STARVED,
        sm_ratio=values.get(Field.PROF_SM_ACTIVE),
    )
    return profile, True
