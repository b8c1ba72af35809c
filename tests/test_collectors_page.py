"""A wide collectors file through the whole node: every form of a field, texts, and dcgm-exporter's own counts."""

import os
from pathlib import Path

from agent_support import matching, running_agent
from page_support import duplicate_series
from pipeline_support import pipeline

from exporter.agent.history import EventLog
from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.collectors_file import parse
from exporter.metrics.text_format import render
from gpu_simulator import scenario

GOLDEN = Path(__file__).parent / "golden"
WIDE = """\
# Names of dcgm-exporter up to 4.8, of DCGM 4.6, of 4.9, of the 1.x file, and numbers.
DCGM_FI_DEV_GPU_TEMP, gauge, Temperature.
DCGM_FI_DEV_BOARD_POWER_WATTS, gauge, Power.
DCGM_FI_DEV_FB_USED_BYTES, gauge, Memory in use.
dcgm_sm_clock, gauge, Clock.
1613, gauge, Utilisation by its new number.
112, gauge, Why clocks are held down.
DCGM_FI_DEV_XID_ERRORS, gauge, Last Xid.
DCGM_FI_PROF_GR_ENGINE_ACTIVE, gauge, Engine.
# What only DCGM measures.
DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE, gauge, Of an instance.
DCGM_FI_PROF_HMMA_UTIL_RATIO, gauge, Of an instance.
1017, gauge, Decoder 0.
1076, gauge, C2C.
DCGM_FI_CUDA_GPU_COMPUTE_CAPABILITY, gauge, Compute capability.
DCGM_FI_DEV_ECC_CURRENT, gauge, ECC.
DCGM_FI_CUDA_DRIVER_VERSION, gauge, Of the node.
# Texts.
DCGM_FI_SYSTEM_DRIVER_VERSION, label, Driver.
DCGM_FI_DEV_VBIOS_VERSION, label, BIOS.
50, label, Name.
# dcgm-exporter's own counts.
DCGM_EXP_XID_ERRORS_COUNT, gauge, Xids lately.
DCGM_EXP_XID_ERRORS_TOTAL, counter, Xids.
DCGM_EXP_CLOCK_EVENTS_COUNT, gauge, Clock events lately.
DCGM_EXP_CLOCK_EVENTS_TOTAL, counter, Clock events.
"""
COLLECTORS = parse(WIDE, "wide.csv")


_PAGES: dict[str, str] = {}


async def page(source: str, directory: Path) -> str:
    """Return the drop-in family of a scrape after a minute of samples; made once for each source."""
    if source not in _PAGES:
        loaded = scenario.load("chaos")
        async with pipeline(loaded, directory / source, start=5.0, source=source, collectors=COLLECTORS) as node:
            node.node.events = EventLog(with_windows=True, xid_window_seconds=300.0, clock_events_window_seconds=60.0)
            snapshot = await node.until(61.0, steps=57)
        shown = families(snapshot, ExpositionOptions(collectors=COLLECTORS))
        assert duplicate_series(shown) == []
        dropped_in = [family for family in shown if family.name.lower().startswith("dcgm_")]
        _PAGES[source] = render(dropped_in, openmetrics=False).decode()
    return _PAGES[source]


async def test_wide_collectors_page_matches_the_golden_file(tmp_path: Path) -> None:
    text = await page("auto", tmp_path)
    golden = GOLDEN / "collectors_wide.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text.splitlines() == golden.read_text().splitlines()


def names(text: str) -> set[str]:
    return {line.split("{")[0] for line in text.splitlines() if line and not line.startswith("#")}


async def test_wide_collectors_without_dcgm_lack_only_the_dcgm_only_rows(tmp_path: Path) -> None:
    both, alone = [names(await page(source, tmp_path)) for source in ("auto", "nvml")]
    assert len(both) == 19
    assert both - alone == {row.name for row in COLLECTORS.dcgm_only}


async def test_dcgm_source_alone_counts_the_same_xids_and_clock_events(tmp_path: Path) -> None:
    def counts(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(("DCGM_EXP_XID_", "DCGM_EXP_CLOCK_EVENTS_TOTAL"))]

    by_dcgm, by_nvml = [counts(await page(source, tmp_path)) for source in ("dcgm", "nvml")]
    assert any('xid="79"' in line for line in by_nvml)
    assert any('clock_event="gpu_idle"' in line for line in by_nvml)
    assert by_dcgm == by_nvml


def test_agent_uses_the_configured_windows_and_warns_about_dcgm_only_rows(
    tmp_path: Path,
) -> None:
    collectors = tmp_path / "wide.csv"
    collectors.write_text(WIDE)
    windows = ("--xid-count-window", "10m", "--clock-events-window", "90s")
    with running_agent("--simulate", "demo", "--collectors", str(collectors), *windows) as agent:
        page = agent.until(lambda shown: matching(shown, "DCGM_EXP_CLOCK_EVENTS_COUNT"), "counts of clock events")
        idle = matching(page, "DCGM_EXP_CLOCK_EVENTS_COUNT", gpu="7", clock_event="gpu_idle", window_size_in_ms="90000")
        assert [count >= 1 for count in idle.values()] == [True]
        assert matching(page, "DCGM_EXP_XID_ERRORS_COUNT", gpu="7", window_size_in_ms="600000")
        (warning,) = [line for line in agent.lines if "only DCGM measures" in line]
        assert "DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE" in warning
        assert "--dcgm-address" in warning
