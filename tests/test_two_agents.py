"""Two agents on one node: one writes the ledger, the other waits and takes over from the saved instant."""

import signal
from pathlib import Path

from agent_support import AgentProcess, gpu_seconds, matching, running_agent
from kill_support import gpus_and_capacity

FAST = ("--simulate", "t4-timeslicing", "--sample-interval", "250ms", "--state-interval", "1s")


def on_one_node(directory: Path, *more: str) -> tuple[str, ...]:
    """Return the options of every agent of the node."""
    state = directory / "state"
    state.mkdir(exist_ok=True)
    return (*FAST, "--state-dir", str(state), "--lock-dir", str(directory / "lock"), *more)


def charged(page: dict[str, float]) -> dict[str, float]:
    """Return the series that only the writer of the ledger shows."""
    return {
        name: value
        for name, value in page.items()
        if name.startswith("gpu_ledger_") or (name.startswith("gpu_pod_") and "_total{" in name)
    }


def writes(agent: AgentProcess) -> dict[str, float]:
    """Return a page of the agent after it has metered and saved something."""
    return agent.until(
        lambda page: page.get("gpu_exporter_ledger_writer") == 1 and page.get("gpu_exporter_state_saved") == 1,
        "the ledger",
    )


def test_second_agent_waits_and_continues_after_the_first_was_killed_or_ended(tmp_path: Path) -> None:
    options = on_one_node(tmp_path)
    with running_agent(*options) as first:
        writes(first)
        gpus, capacity, steady = gpus_and_capacity(tmp_path / "state")
        began = steady - capacity / gpus
        with running_agent(*options) as second:
            page = second.until(lambda page: matching(page, "gpu_activity_ratio"), "samples")
            assert page["gpu_exporter_ledger_writer"] == 0
            assert first.series()["gpu_exporter_ledger_locked"] == 1
            assert "gpu_exporter_ledger_locked" not in page
            assert charged(page) == {}
            assert [name for name in page if name.startswith("gpu_owner_")] == []
            assert gpu_seconds(page) == 0
            status, text = second.get("/readyz")
            assert status == 200, "a rolling update waits for the new agent to be ready before it ends the old one"
            assert "another agent on this node writes the ledger" in text
            assert [line for line in second.lines if "another agent on this node" in line] != []
            before = charged(first.series())
            assert first.end(signal.SIGKILL) == -signal.SIGKILL
            after = writes(second)
            assert {name for name, value in before.items() if after.get(name, 0.0) < value} == set()
            assert after["gpu_exporter_conservation_error_seconds"] < 1e-6
            assert "another agent" not in second.get("/readyz")[1]
            with running_agent(*options) as third:
                third.until(lambda page: page.get("gpu_exporter_ledger_writer") == 0, "a third agent")
                before = charged(second.series())
                assert second.end() == 0
                after = writes(third)
                assert {name for name, value in before.items() if after.get(name, 0.0) < value} == set()
                assert third.end() == 0
    gpus, capacity, steady = gpus_and_capacity(tmp_path / "state")
    assert abs(steady - capacity / gpus - began) < 1e-6, "every second since the start counts once"


def test_second_agent_without_state_starts_a_ledger_after_the_first_ended(tmp_path: Path) -> None:
    options = (*FAST, "--lock-dir", str(tmp_path / "lock"))
    with running_agent(*options) as first, running_agent(*options) as second:
        first.until(charged, "the ledger")
        second.until(lambda page: page.get("gpu_exporter_ledger_writer") == 0, "a second agent")
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
        page = second.until(charged, "a ledger of its own")
        assert page["gpu_exporter_ledger_writer"] == 1


def test_unavailable_lock_is_reported_and_the_state_directory_is_locked(tmp_path: Path) -> None:
    options = (*on_one_node(tmp_path), "--lock-dir", str(tmp_path / "none" / "below"))
    with running_agent(*options) as first:
        assert writes(first)["gpu_exporter_ledger_locked"] == 0
        status, text = first.get("/readyz")
        assert status == 200
        assert "set --lock-dir" in text
        assert len([line for line in first.lines if "cannot lock" in line]) == 1
        with running_agent(*options) as second:
            assert (
                second.until(lambda page: "gpu_exporter_ledger_writer" in page, "it")["gpu_exporter_ledger_writer"] == 0
            )


def test_simulated_nodes_do_not_share_a_lock() -> None:
    with running_agent(*FAST) as first, running_agent(*FAST) as second:
        for agent in (first, second):
            page = agent.until(charged, "a ledger")
            assert page["gpu_exporter_ledger_writer"] == 1
            assert "gpu_exporter_ledger_locked" not in page
            assert "note: ledger" not in agent.get("/readyz")[1]
