"""The agent with two source processes: one dies, hangs or is released, and the other continues."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_support import ROOT, AgentProcess, matching, running_agent

Page = dict[str, float]
ADDRESS = "localhost:5555"
INTERVAL = ("--sample-interval", "500ms")
INSTANCES = 4


@contextmanager
def both(scenario: str | Path = "a100-mig", *arguments: str) -> Iterator[AgentProcess]:
    """Run an agent that reads NVML and DCGM, from the first page with answers of both."""
    options = ("--simulate", str(scenario), "--dcgm-address", ADDRESS, *INTERVAL, *arguments)
    with running_agent(*options) as agent:
        agent.until(lambda page: works(page, "nvml") and works(page, "dcgm"), "both sources answer")
        yield agent


def with_faults(directory: Path, *faults: str) -> Path:
    """Return the scenario of a partitioned A100, with faults."""
    text = (ROOT / "simulator/gpu_simulator/scenarios/a100-mig.yaml").read_text(encoding="utf-8")
    path = directory / "faulty.yaml"
    path.write_text("\n".join([text, "faults:", *(f"  - {{{fault}}}" for fault in faults), ""]), encoding="utf-8")
    return path


def works(page: Page, source: str) -> bool:
    return page.get(f'gpu_exporter_source_up{{source="{source}"}}') == 1


def child_of(agent: AgentProcess, source: str) -> int:
    """Return the process id of the child that reads a source."""
    asks = {
        pid: b"--dcgm-address" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in agent.children()
    }
    (found,) = [pid for pid, asks_dcgm in asks.items() if asks_dcgm is (source == "dcgm")]
    return found


def of_instances(page: Page) -> Page:
    return {key: value for key, value in matching(page, "gpu_activity_ratio").items() if "gpu_instance=" in key}


def profiled(page: Page) -> Page:
    return matching(page, "DCGM_FI_PROF_GR_ENGINE_ACTIVE")


def up(page: Page) -> list[float]:
    return list(matching(page, "gpu_up").values())


def test_both_sources_provide_their_fields_and_every_page_names_the_source() -> None:
    with both() as agent:
        page = agent.until(lambda page: len(of_instances(page)) == INSTANCES, "activity of MIG instances")
        assert all('measured_by="dcgm"' in series for series in of_instances(page))
        assert matching(page, "DCGM_FI_DEV_GPU_TEMP"), "from NVML, as without DCGM"
        assert page['gpu_exporter_dcgm_info{version="4.6.0"}'] == 1
        assert set(matching(page, "gpu_profiling_state", state="running").values()) == {1.0}
        document = json.loads(agent.get("/api/v1/devices")[1])
        assert [source["name"] for source in document["sources"]] == ["nvml", "dcgm"]
        assert document["dcgm_version"] == "4.6.0"
        by_kind = {device["kind"]: device["activity_measured_by"] for device in document["devices"]}
        assert by_kind["mig_instance"] == "dcgm"
        shown = agent.get("/")[1]
        assert "DCGM 4.6.0" in shown
        assert "dcgm up" in shown
        assert "engine, DCGM" in shown


def test_dcgm_keeps_every_gpu_up_while_nvml_hangs() -> None:
    with both("t4-timeslicing") as agent:
        os.kill(child_of(agent, "nvml"), signal.SIGSTOP)
        dark = []

        def nvml_leads(page: Page) -> bool:
            activity = matching(page, "gpu_activity_ratio")
            dark.append(len(activity) < len(up(page)) or min(up(page), default=0.0) < 1)
            return bool(matching(page, "gpu_temperature_celsius"))  # not requested from DCGM while NVML runs

        page = agent.until(lambda page: not nvml_leads(page), "DCGM has taken over")
        assert all('measured_by="dcgm"' in series for series in matching(page, "gpu_activity_ratio"))
        assert matching(page, "gpu_activity_ratio", source="codec"), "a transcoder is not idle in that time"
        assert agent.get("/readyz")[0] == 200
        page = agent.until(nvml_leads, "NVML is back")
        assert matching(page, "gpu_exporter_errors_total", part="nvml", reason="hung")
        assert not any(dark), "every page in that time has every GPU"
        assert page["gpu_exporter_conservation_error_seconds"] == pytest.approx(0, abs=1e-6)
        assert not any("tick failed" in line for line in agent.lines)


def test_failing_engine_removes_only_its_own_values(tmp_path: Path) -> None:
    paused = "kind: profiling_paused, from: 0, for: 10, every: 60"
    gone, hung = "kind: engine_down, from: 16, for: 5, every: 60", "kind: engine_hang, from: 34, for: 6, every: 60"
    with both(with_faults(tmp_path, paused, gone, hung)) as agent:
        page = agent.until(lambda page: matching(page, "gpu_profiling_state", state="paused"), "paused")
        assert not profiled(page)
        assert of_instances(page) == {}
        shown = agent.get("/")[1]
        assert "is paused, for the whole host engine" in shown
        assert "dcgmi profile --resume" in shown
        page = agent.until(lambda page: len(of_instances(page)) == INSTANCES, "profiling continues")
        assert not matching(page, "gpu_profiling_state", state="paused")
        assert "is paused" not in agent.get("/")[1]

        page = agent.until(lambda page: not works(page, "dcgm"), "the loss is shown")
        assert works(page, "nvml")
        page = agent.until(lambda page: not profiled(page), "profiling fields are gone, and not 0")
        assert of_instances(page) == {}
        assert not matching(page, "gpu_exporter_dcgm_info")
        assert not matching(page, "gpu_profiling_state")
        assert set(up(page)) == {1.0}
        assert matching(page, "gpu_power_watts")
        status, text = agent.get("/readyz")
        assert (status, "note: dcgm: failed" in text) == (200, True)
        assert "meanwhile NVML measures alone" in agent.get("/")[1]
        page = agent.until(lambda page: len(of_instances(page)) == INSTANCES, "all of it is back")
        assert matching(page, "gpu_exporter_errors_total", part="dcgm")
        lost = [line for line in agent.lines if "source dcgm is failed" in line]
        causes = {line.partition("source dcgm is failed")[2] for line in lost}
        assert len(lost) == len(causes) <= 2, "lost, then refused: each is logged once for all attempts"

        page = agent.until(lambda page: not profiled(page), "figures of an engine that hangs are not shown")
        assert set(up(page)) == {1.0}
        assert works(page, "nvml")
        ages = page["gpu_exporter_snapshot_timestamp_seconds"] - page["gpu_exporter_sample_timestamp_seconds"]
        assert ages < 2.0, "NVML readings continue"
        agent.until(profiled, "they return by themselves")


def test_release_closes_both_children_until_they_resume_and_end_with_the_agent() -> None:
    with both("t4-timeslicing") as agent:
        before = set(agent.children())
        assert len(before) == 2
        assert agent.ask("POST", "/-/release?seconds=2")[0] == 202
        page = agent.until(lambda page: not works(page, "nvml") and not works(page, "dcgm"), "both are let go of")
        page = agent.until(lambda page: not any(up(page)), "no GPU is answered for")
        assert agent.get("/readyz")[0] == 503
        assert not before & set(agent.children())
        page = agent.until(lambda page: works(page, "nvml") and works(page, "dcgm"), "both return")
        assert set(up(page)) == {1.0}
        children = agent.children()
        assert len(children) == 2
        assert agent.end(seconds=5.0) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_dcgm_source_alone_starts_no_nvml_child() -> None:
    options = ("--simulate", "a100-mig", "--source", "dcgm", *INTERVAL)
    with running_agent(*options) as agent:
        page = agent.until(lambda page: len(of_instances(page)) == INSTANCES, "activity of MIG instances")
        assert len(agent.children()) == 1
        assert not matching(page, "gpu_exporter_source_up", source="nvml")
        assert set(up(page)) == {1.0}
        assert agent.get("/readyz")[0] == 200
