"""Xids on a page, scrape after scrape: also of a lost GPU, and without delivery by NVML."""

from pathlib import Path

import pytest
from page_support import rows
from pipeline_support import Pipeline, pipeline

from gpu_simulator import driver, scenario

NOT_SUPPORTED, RESET_REQUIRED = 3, 16
LAST, OWN = "DCGM_FI_DEV_XID_ERRORS", "gpu_xid_errors_total"
FALLEN = """
node: n1
gpus: [{model: a100-80gb}, {model: a100-80gb}]
xids: [{gpu: 0, code: 79, at: 19.5}]
faults: [{kind: gpu_lost, gpu: 0, from: 20}]
"""
RESET = """
node: n1
gpus: [{model: h100}]
xids: [{gpu: 0, code: 95, at: 9.5}]
"""
QUIET = """
node: n1
gpus: [{model: a100-80gb}]
xids: [{gpu: 0, code: 94, at: 4.5}, {gpu: 0, code: 119, at: 9.5}]
"""


def loaded(directory: Path, text: str) -> scenario.Scenario:
    path = directory / "scenario.yaml"
    path.write_text(text)
    return scenario.load(str(path))


async def alert_fires(node: Pipeline, scrapes: range) -> list[bool]:
    """Evaluate ``DCGM_FI_DEV_XID_ERRORS == 79`` at each scrape of the page."""
    return [any(value == 79 for _, value in rows(await node.until(second), LAST)) for second in scrapes]


@pytest.mark.parametrize("source", ["nvml", "dcgm", "auto"])
async def test_public_xid_79_alert_fires_at_every_scrape_after_it(source: str, tmp_path: Path) -> None:
    async with pipeline(loaded(tmp_path, FALLEN), tmp_path, source=source) as node:
        assert await alert_fires(node, range(15, 106, 15)) == [False, True, True, True, True, True, True]
        ((labels, value),) = rows(await node.step(106), LAST)
        assert (labels["gpu"], labels["err_code"], value) == ("0", "79", 79)


async def test_gpu_needing_a_reset_keeps_the_rows_that_the_driver_answers(tmp_path: Path) -> None:
    async with pipeline(loaded(tmp_path, RESET), tmp_path) as node:
        before = await node.until(15)
        driver.fail("nvmlDeviceGetPowerUsage", RESET_REQUIRED)
        after = await node.until(30)
    kept = ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_FAILURE", "DCGM_FI_DEV_FB_USED", LAST)
    assert [len(rows(before, name)) for name in kept] == [1, 1, 1, 1]
    assert after.devices[0].state == "reset_required"
    assert [len(rows(after, name)) for name in kept] == [1, 1, 1, 1]
    assert rows(after, "DCGM_FI_DEV_POWER_USAGE") == []


async def test_xids_from_dcgm_are_shown_if_nvml_delivers_no_events(tmp_path: Path) -> None:
    async with pipeline(loaded(tmp_path, QUIET), tmp_path, source="auto") as node:
        nvml, _ = node.sampled
        nvml.close()
        driver.fail("nvmlDeviceGetSupportedEventTypes", NOT_SUPPORTED)
        page = await node.until(12.0, steps=12)
    assert [(labels["xid"], value) for labels, value in rows(page, OWN)] == [("94", 1), ("119", 1)]
    assert [value for _, value in rows(page, LAST)] == [119]
