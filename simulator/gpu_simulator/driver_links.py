"""NVML functions of the links to a device, PCIe and NVLink, and of vGPU licences."""

from exporter.model import Field
from gpu_simulator.driver_board import read
from gpu_simulator.driver_core import INVALID_ARGUMENT, NOT_SUPPORTED, Calls, CArgument, Refused, Target, out, plain
from gpu_simulator.driver_device import whole

CALLS = Calls()

_LINKS = 18
_PCIE_MEASURES_SECONDS = 0.02
"""The real call blocks at least this long by design, which is why nobody should make it."""
_ERROR_COUNTERS = {
    0: Field.NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    1: Field.NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    2: Field.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    3: Field.NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
}
_VGPU_LICENSED_FEATURE = 1


def _check_link(target: Target, link: CArgument) -> None:
    if read(target.gpu, Field.NVLINK_TX_BYTES_TOTAL) is None:
        raise Refused(NOT_SUPPORTED)
    if not 0 <= plain(link) < _LINKS:
        raise Refused(INVALID_ARGUMENT)


@CALLS.device("nvmlDeviceGetNvLinkState")
def _link_state(target: Target, link: CArgument, active: CArgument) -> None:
    _check_link(target, link)
    out(active).value = 1


@CALLS.device("nvmlDeviceGetNvLinkErrorCounter")
def _link_errors(target: Target, link: CArgument, counter: CArgument, count: CArgument) -> None:
    _check_link(target, link)
    if plain(counter) not in _ERROR_COUNTERS:
        raise Refused(INVALID_ARGUMENT)
    total = whole(target.gpu, _ERROR_COUNTERS[plain(counter)])
    out(count).value = total if plain(link) == 0 else 0


@CALLS.device("nvmlDeviceGetPcieThroughput")
def _pcie_throughput(target: Target, direction: CArgument, kb_per_second: CArgument) -> None:
    target.session.sleep(_PCIE_MEASURES_SECONDS)
    load = target.gpu.load
    rate = (load.pcie_tx_bytes_per_second, load.pcie_rx_bytes_per_second)[plain(direction)]
    out(kb_per_second).value = round(rate / 1000)


@CALLS.device("nvmlDeviceGetGridLicensableFeatures_v4", "nvmlDeviceGetGridLicensableFeatures_v3")
def _licences(target: Target, features: CArgument) -> None:
    struct = out(features)
    licensed = whole(target.gpu, Field.VGPU_LICENSE_STATUS)
    struct.isGridLicenseSupported = struct.licensableFeaturesCount = licensed
    if licensed:
        struct.gridLicensableFeatures[0].featureCode = _VGPU_LICENSED_FEATURE
        struct.gridLicensableFeatures[0].featureState = 1
