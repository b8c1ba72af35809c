"""The truth table: from the number of GPUs in each layer to the failed layer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.doctor.checks import Counts, diagnose
from exporter.doctor.findings import Finding, Level

NONE = None
DRIVER, TOOLKIT, PLUGIN, KUBELET = "driver", "container toolkit", "device plugin", "kubelet"


def layer_of(found: Finding) -> str | None:
    """Return the layer that a finding blames; its severity must be that of the layer."""
    if found.level is Level.OK:
        return NONE
    layer = found.cause.partition(": ")[0]
    assert layer in {DRIVER, TOOLKIT, PLUGIN, KUBELET}
    assert found.level is (Level.FAIL if layer in {DRIVER, TOOLKIT} else Level.WARN)
    return layer


# bus, driver, seen, advertised, allocated, by claims: layer, a word of the cause
TABLE = [
    # All is well.
    (8, 8, 8, 8, 5, False, NONE, "8 advertised, 5 held"),
    (8, 8, 8, 8, None, False, NONE, "8 advertised"),
    (None, None, 8, 8, 0, False, NONE, "0 held"),
    (1, 1, 1, 1, 1, False, NONE, "1 GPU here"),
    (0, None, 1, 1, 0, False, NONE, "1 GPU here"),  # Tegra: not on the bus
    (8, 8, 8, None, None, False, NONE, "not known"),
    (0, None, 0, 0, 0, False, NONE, "no GPU here"),
    (0, None, None, 0, 0, False, NONE, "no GPU here"),
    # DRA alone: the kubelet advertises nothing, which is correct.
    (8, 8, 8, 0, 3, True, NONE, "claims"),
    (8, 8, 8, None, 3, True, NONE, "claims (DRA), 3 held"),
    (8, 8, 8, 8, 0, True, NONE, "8 advertised"),
    # The driver.
    (8, None, None, 0, 0, False, DRIVER, "no driver is loaded"),
    (8, None, None, None, None, False, DRIVER, "no driver is loaded"),
    (8, None, 0, 0, 3, False, DRIVER, "no driver is loaded"),
    (8, 0, None, 0, 0, False, DRIVER, "taken 0"),
    (8, 7, 7, 7, 7, False, DRIVER, "taken 7"),
    (8, 7, 7, 8, 8, False, DRIVER, "taken 7"),
    (8, 8, 7, 7, 7, False, DRIVER, "does not give all"),
    (8, 8, 0, 0, 3, False, DRIVER, "any more"),
    (7, 7, 7, 7, 8, False, DRIVER, "fell off the bus"),
    (7, 7, 7, 8, 1, False, DRIVER, "fell off the bus"),
    (7, None, 7, 8, 1, False, DRIVER, "PCI bus has 7 now"),
    (None, None, 7, 7, 8, False, DRIVER, "the driver does not give all of 8"),
    (8, None, 7, 7, 7, False, DRIVER, "the driver does not give all of 8"),
    # This container sees fewer GPUs than exist.
    (8, 8, 4, 8, 8, False, TOOLKIT, "the device plugin is shown 8"),
    (8, 8, 4, None, None, False, TOOLKIT, "driver has 8 GPUs, NVML shows 4"),
    (8, 8, None, 8, 2, False, TOOLKIT, "NVML does not work here"),
    (8, 8, None, 0, 0, False, TOOLKIT, "NVML does not work here"),
    (8, 8, 0, 0, 0, False, TOOLKIT, "NVML shows 0"),
    (8, None, 4, 8, 2, False, TOOLKIT, "PCI bus has 8"),
    (None, None, 7, 8, 8, False, TOOLKIT, "device plugin is shown 8"),
    (None, None, None, 8, 8, False, TOOLKIT, "device plugin is shown 8"),
    (8, 8, 4, 8, 8, True, TOOLKIT, "NVML shows 4"),
    # The device plugin.
    (8, 8, 8, 0, 0, False, PLUGIN, "no device plugin advertises one"),
    (None, None, 8, 0, None, False, PLUGIN, "no device plugin advertises one"),
    (8, 8, 8, 7, 7, False, PLUGIN, "7 as healthy"),
    (8, 8, 8, 7, 8, False, PLUGIN, "7 as healthy"),
    (8, 8, 8, 7, 7, True, PLUGIN, "DRA driver or device plugin advertises 7"),
    # The kubelet.
    (8, 8, 8, 0, 5, False, KUBELET, "not registered"),
    (8, 8, 8, None, 5, False, KUBELET, "does not report"),
]


@pytest.mark.parametrize(("bus", "driver", "seen", "advertised", "allocated", "claims", "layer", "word"), TABLE)
def test_each_combination_names_its_layer(
    bus: int | None,
    driver: int | None,
    seen: int | None,
    advertised: int | None,
    allocated: int | None,
    claims: bool,  # noqa: FBT001 - a column of the table
    layer: str | None,
    word: str,
) -> None:
    found = diagnose(
        Counts(
            on_bus=bus,
            in_driver=driver,
            seen=seen,
            advertised=advertised,
            allocated=allocated,
            by_claims=claims,
        )
    )
    assert (layer_of(found), word in found.cause) == (layer, True), found.cause
    assert bool(found.fix) is (layer is not NONE)


COUNT = st.none() | st.integers(0, 16)


@given(COUNT, COUNT, COUNT, COUNT, COUNT, st.booleans())
def test_every_combination_has_a_cause_and_every_failure_a_fix(
    bus: int | None,
    driver: int | None,
    seen: int | None,
    advertised: int | None,
    allocated: int | None,
    claims: bool,  # noqa: FBT001 - as above
) -> None:
    found = diagnose(
        Counts(on_bus=bus, in_driver=driver, seen=seen, advertised=advertised, allocated=allocated, by_claims=claims)
    )
    assert found.cause
    assert bool(found.fix) is (layer_of(found) is not NONE)


@given(st.integers(1, 16), st.data())
def test_consistent_layers_are_never_reported(count: int, data: st.DataObject) -> None:
    same = st.sampled_from([None, count])
    counts = Counts(
        on_bus=data.draw(same),
        in_driver=data.draw(same),
        seen=count,
        advertised=count,
        allocated=data.draw(st.none() | st.integers(0, count)),
        by_claims=data.draw(st.booleans()),
    )
    assert layer_of(diagnose(counts)) is NONE
